#include "fsdp/options/options.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"
#include "device_ops/block_quantization.h"

namespace fsdp {

absl::Status Quantization::Validate() const {
  if (block < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "quantize: a block of ", block,
        " numbers cannot share a scale: it takes at least 1; 256 is usual"));
  }
  if (block > device_ops::kMaxBlock) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantize: a block of ", block,
                     " numbers is too long to share a scale: it takes at most ",
                     device_ops::kMaxBlock, "; 256 is usual"));
  }
  if (gather_extension != nullptr && !gather) {
    return absl::InvalidArgumentError(
        "quantize: there is a gather_extension, and `gather` is false: set it "
        "to have parameters gathered by the extension");
  }
  if (min_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantize: min_bytes is ", min_bytes,
                     "; no size is below 0, with which everything is "
                     "quantised"));
  }
  return absl::OkStatus();
}

comm::QuantizationOptions Quantization::ForGroup(int64_t exact_tail) const {
  comm::QuantizationOptions options;
  options.gather = gather;
  options.reduce = reduce;
  options.block = block;
  options.min_bytes = min_bytes;
  options.exact_tail = exact_tail;
  options.log = log;
  options.gather_extension = gather_extension;
  return options;
}

std::string Quantization::ToString() const {
  if (!any()) return "";
  return absl::StrCat(gather ? "gathers" : "",
                      gather_extension == nullptr
                          ? ""
                          : absl::StrCat(" by ", gather_extension->ToString()),
                      gather && reduce ? ", " : "", reduce ? "sums" : "",
                      " in blocks of ", block, " from ", min_bytes,
                      " bytes on");
}

WrapPolicy WrapLargerThan(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) {
    return candidate.unowned_numel >= min_numel;
  };
}

WrapPolicy EveryUnit() {
  return [](const WrapCandidate& candidate) { return candidate.is_unit; };
}

WrapPolicy WrapAny(WrapPolicy first, WrapPolicy second) {
  return [first = std::move(first),
          second = std::move(second)](const WrapCandidate& candidate) {
    return first(candidate) || second(candidate);
  };
}

const char* ToString(ShardingStrategy strategy) {
  static constexpr const char* kNames[] = {
      "full shard",      "shard gradients and optimizer",
      "shard optimizer", "no shard",
      "hybrid shard",    "hybrid shard gradients and optimizer"};
  return kNames[static_cast<int>(strategy)];
}

}  // namespace fsdp
