#include "offload/param_store.h"

#include "absl/strings/str_cat.h"

namespace fsdp::offload {

absl::Status CheckNewRegion(absl::string_view region, int64_t bytes) {
  if (region.empty() || static_cast<int64_t>(region.size()) > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("create a region: its name has ", region.size(),
                     " bytes; take 1 to ", kMaxNameBytes));
  }
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "create region '", region, "': ", bytes, " bytes is no size"));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(absl::string_view what, absl::string_view region,
                        int64_t size, int64_t offset, int64_t length) {
  if (offset >= 0 && offset <= size && length <= size - offset) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(
      absl::StrCat(what, " region '", region, "': ", length,
                   " bytes from offset ", offset, " on, of ", size));
}

absl::Status RegionExists(absl::string_view region) {
  return absl::AlreadyExistsError(
      absl::StrCat("create region '", region, "': there is one of this name"));
}

absl::Status CannotRollBack(absl::string_view store) {
  return absl::UnimplementedError(absl::StrCat(
      "roll back ", store,
      ": it does not keep what is written over; make it with `rollback`"));
}

absl::Status NoSuchRegion(absl::string_view what, absl::string_view region) {
  return absl::NotFoundError(
      absl::StrCat(what, " region '", region,
                   "': there is none of this name; create it first"));
}

}  // namespace fsdp::offload
