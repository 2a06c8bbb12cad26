#include "checkpoint/files/testing/faulty_file_system.h"

#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

void FaultyFileSystem::FailCall(int64_t call, int error, bool for_good) {
  absl::MutexLock lock(&mutex_);
  first_ = call;
  error_ = error;
  for_good_ = for_good;
}

void FaultyFileSystem::StopAtCall(int64_t call) {
  FailCall(call, /*error=*/0, /*for_good=*/true);
}

int64_t FaultyFileSystem::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

absl::Status FaultyFileSystem::BeforeChange(absl::string_view what,
                                            const std::string& path) {
  absl::MutexLock lock(&mutex_);
  const int64_t call = calls_++;
  const bool hit = first_ >= 0 && (for_good_ ? call >= first_ : call == first_);
  if (!hit) return absl::OkStatus();
  return error_ != 0 ? FileError(error_, what, path)
                     : absl::AbortedError("the process has ended");
}

absl::Status FaultyFileSystem::BeforeReading(const std::string&) {
  absl::MutexLock lock(&mutex_);
  const bool ended = first_ >= 0 && error_ == 0 && calls_ > first_;
  return ended ? absl::AbortedError("the process has ended") : absl::OkStatus();
}

}  // namespace fsdp::checkpoint::testing
