#include "offload/file_layout.h"

#include "absl/strings/str_cat.h"

namespace fsdp::offload {

void FileOperation::Finish(absl::Status status) {
  if (when_over != nullptr) when_over(status);
  when_over = nullptr;
  absl::MutexLock lock(&mutex_);
  result_ = std::move(status);
  over_ = true;
}

absl::Status FileOperation::Wait(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  // A deadline in the infinite past asks and does not wait.
  if (over_ || (deadline > absl::InfinitePast() &&
                mutex_.AwaitWithDeadline(absl::Condition(&over_), deadline))) {
    return result_;
  }
  const std::string what =
      kind == Kind::kFlush
          ? "flush"
          : absl::StrCat(kind == Kind::kRead ? "read" : "write", " region '",
                         region->name, "', ", bytes, " bytes from offset ",
                         offset, " on");
  return absl::DeadlineExceededError(absl::StrCat(
      what,
      ": not done at the deadline, and still running; wait longer, "
      "or see what keeps the device busy"));
}

}  // namespace fsdp::offload
