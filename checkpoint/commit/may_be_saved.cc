#include "checkpoint/commit/may_be_saved.h"

#include "absl/strings/str_cat.h"

namespace fsdp::checkpoint {

absl::Status MayBeSaved(const absl::Status& why, int64_t step) {
  return absl::Status(why.code(), absl::StrCat(why.message(), "; step ", step,
                                               " may be saved all the same"));
}

}  // namespace fsdp::checkpoint
