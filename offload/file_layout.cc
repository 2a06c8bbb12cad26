#include "offload/file_layout.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::offload {

std::string FileOperation::ToString() const {
  if (kind == Kind::kFlush) return "flush";
  return absl::StrCat(kind == Kind::kRead ? "read" : "write", " region '",
                      region->name, "', ", bytes, " bytes from offset ", offset,
                      " on");
}

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
  return absl::DeadlineExceededError(absl::StrCat(
      ToString(),
      ": not done at the deadline, and still running; wait longer, "
      "or see what keeps the device busy"));
}

FileTransfer::FileTransfer(std::shared_ptr<FileOperation> operation)
    : operation_(std::move(operation)) {}

FileTransfer::~FileTransfer() {
  operation_->Wait(absl::InfiniteFuture()).IgnoreError();
}

absl::Status FileTransfer::Wait(absl::Time deadline) {
  return operation_->Wait(deadline);
}

}  // namespace fsdp::offload
