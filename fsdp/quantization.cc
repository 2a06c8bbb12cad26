#include "fsdp/quantization.h"

#include "absl/strings/str_cat.h"

namespace fsdp {

absl::Status Quantization::Validate() const {
  if (block < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "quantize: a block of ", block,
        " numbers cannot share a scale: it takes at least 1; 256 is usual"));
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
  return options;
}

std::string Quantization::ToString() const {
  if (!any()) return "";
  return absl::StrCat(gather ? "gathers" : "", gather && reduce ? ", " : "",
                      reduce ? "sums" : "", " in blocks of ", block, " from ",
                      min_bytes, " bytes on");
}

}  // namespace fsdp
