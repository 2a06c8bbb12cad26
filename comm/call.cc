#include "comm/call.h"

#include <tuple>

#include "absl/strings/str_cat.h"

namespace fsdp::comm {
namespace {

auto Fields(const Call& call) {
  return std::tie(call.collective, call.label, call.dtype, call.count,
                  call.detail);
}

}  // namespace

absl::string_view CollectiveName(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all-gather";
    case Collective::kReduceScatter:
      return "reduce-scatter";
    case Collective::kAllToAll:
      return "all-to-all";
    case Collective::kAllReduce:
      return "all-reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kSplit:
      return "split";
  }
  return "unknown collective";
}

absl::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown reduction";
}

bool operator==(const Call& a, const Call& b) { return Fields(a) == Fields(b); }

std::string ToString(const Call& call) {
  std::string text =
      absl::StrCat(CollectiveName(call.collective), " of ", call.label);
  if (!call.dtype.empty()) {
    absl::StrAppend(&text, " (", call.dtype, " x ", call.count);
    if (!call.detail.empty()) absl::StrAppend(&text, ", ", call.detail);
    absl::StrAppend(&text, ")");
  }
  return text;
}

std::string Name(const Call& call, int64_t sequence) {
  return absl::StrCat(CollectiveName(call.collective), " #", sequence, " of ",
                      call.label);
}

}  // namespace fsdp::comm
