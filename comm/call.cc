#include "comm/call.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/check.h"

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

namespace {

bool IsWord(char c) { return absl::ascii_isalnum(c) || c == '_'; }

// Takes a number from the front of `text`, or takes nothing and returns -1.
int ConsumeNumber(absl::string_view* text) {
  size_t size = 0;
  while (size < text->size() && absl::ascii_isdigit((*text)[size])) ++size;
  int number = -1;
  const bool ends = size == text->size() || !IsWord((*text)[size]);
  if (!ends || !absl::SimpleAtoi(text->substr(0, size), &number)) return -1;
  text->remove_prefix(size);
  return number;
}

// The words behind "rank " in a name or a place.
struct Mention {
  int world_rank = -1;
  bool is_place = false;  // "1 of 4", not "1"
};

// Takes "1 (world rank 5)" or "1 of 4 (world rank 5)" from the front of `text`.
// If there is neither it takes nothing and returns no world rank.
Mention ConsumeMention(absl::string_view* text) {
  absl::string_view rest = *text;
  Mention mention;
  if (ConsumeNumber(&rest) < 0) return {};
  if (absl::ConsumePrefix(&rest, " of ")) {
    mention.is_place = true;
    if (ConsumeNumber(&rest) < 0) return {};
  }
  if (!absl::ConsumePrefix(&rest, " (world rank ")) return {};
  mention.world_rank = ConsumeNumber(&rest);
  if (mention.world_rank < 0 || !absl::ConsumePrefix(&rest, ")")) return {};
  *text = rest;
  return mention;
}

}  // namespace

RankNames::RankNames(int size) : RankNames(size, nullptr) {}

RankNames::RankNames(int size,
                     std::shared_ptr<const std::vector<int>> world_ranks)
    : size_(size), world_ranks_(std::move(world_ranks)) {
  FSDP_CHECK(size > 0);
}

absl::StatusOr<RankNames> RankNames::Of(int size,
                                        std::vector<int> world_ranks) {
  if (world_ranks.empty()) return RankNames(size);
  if (static_cast<int>(world_ranks.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrCat("a group of ", size, " ranks, and ", world_ranks.size(),
                     " ranks of the world that they are"));
  }
  return RankNames(
      size, std::make_shared<const std::vector<int>>(std::move(world_ranks)));
}

RankNames RankNames::Part(absl::Span<const int> members) const {
  std::vector<int> world_ranks;
  bool is_all = static_cast<int>(members.size()) == size_;
  for (const int member : members) {
    is_all = is_all && member == static_cast<int>(world_ranks.size());
    world_ranks.push_back(world_rank(member));
  }
  if (is_all) return *this;
  const auto size = static_cast<int>(members.size());
  return RankNames(
      size, std::make_shared<const std::vector<int>>(std::move(world_ranks)));
}

int RankNames::world_rank(int rank) const {
  FSDP_CHECK(rank >= 0 && rank < size_);
  return world_ranks_ == nullptr ? rank : (*world_ranks_)[rank];
}

std::string RankNames::Suffix(int rank) const {
  if (world_ranks_ == nullptr || world_rank(rank) == kNobodyKnows) return "";
  return absl::StrCat(" (world rank ", world_rank(rank), ")");
}

std::string RankNames::Name(int rank) const {
  return absl::StrCat("rank ", rank, Suffix(rank));
}

std::string RankNames::Place(int rank) const {
  return absl::StrCat("rank ", rank, " of ", size_, Suffix(rank));
}

std::string RankNames::List(absl::Span<const int> ranks) const {
  if (ranks.size() == 1) return Name(ranks[0]);
  std::string text = absl::StrCat("ranks ", absl::StrJoin(ranks, ", "));
  if (world_ranks_ == nullptr) return text;
  std::vector<int> world_ranks;
  world_ranks.reserve(ranks.size());
  for (const int rank : ranks) {
    if (world_rank(rank) == kNobodyKnows) return text;
    world_ranks.push_back(world_rank(rank));
  }
  return absl::StrCat(text, " (world ranks ", absl::StrJoin(world_ranks, ", "),
                      ")");
}

std::string RankNames::NameInWorld(int world_rank) const {
  return absl::StrCat(world_ranks_ == nullptr ? "" : "world ", "rank ",
                      world_rank);
}

int RankNames::RankOf(int world_rank) const {
  if (world_ranks_ == nullptr) return world_rank < size_ ? world_rank : -1;
  const auto found =
      std::find(world_ranks_->begin(), world_ranks_->end(), world_rank);
  return found == world_ranks_->end()
             ? -1
             : static_cast<int>(found - world_ranks_->begin());
}

std::string RankNames::Adopt(absl::string_view text) const {
  constexpr absl::string_view kRank = "rank ";
  std::string result;
  while (true) {
    const size_t found = text.find(kRank);
    if (found == absl::string_view::npos) break;
    const bool is_word = found == 0 || !IsWord(text[found - 1]);
    absl::StrAppend(&result, text.substr(0, found));
    text.remove_prefix(found + kRank.size());
    absl::string_view rest = text;
    const Mention mention = is_word ? ConsumeMention(&rest) : Mention();
    const int rank = mention.world_rank < 0 ? -1 : RankOf(mention.world_rank);
    if (rank < 0) {
      absl::StrAppend(&result, kRank);
      continue;
    }
    absl::StrAppend(&result, mention.is_place ? Place(rank) : Name(rank));
    text = rest;
  }
  return absl::StrCat(result, text);
}

}  // namespace fsdp::comm
