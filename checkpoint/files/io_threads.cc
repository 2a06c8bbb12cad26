#include "checkpoint/files/io_threads.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {

IoThreads::IoThreads(int count) {
  while (count-- > 0) {
    absl::StatusOr<std::thread> thread =
        StartThread("to read and write checkpoints", [this] { Work(); });
    if (!thread.ok()) return;
    threads_.push_back(*std::move(thread));
  }
}

IoThreads::~IoThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void IoThreads::Run(absl::AnyInvocable<void()> job) {
  if (threads_.empty()) {
    job();
    return;
  }
  absl::MutexLock lock(&mutex_);
  jobs_.push_back(std::move(job));
}

void IoThreads::Work() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    mutex_.Await(absl::Condition(this, &IoThreads::HasWork));
    if (jobs_.empty()) return;
    absl::AnyInvocable<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    mutex_.Unlock();
    job();
    job = nullptr;
    mutex_.Lock();
  }
}

namespace {

// A cancellation is noticed within this time.
constexpr absl::Duration kSlice = absl::Milliseconds(50);

PaceOptions WithTime(PaceOptions options) {
  if (!options.now) options.now = absl::Now;
  if (!options.sleep) options.sleep = absl::SleepFor;
  return options;
}

}  // namespace

Pace::Pace(PaceOptions options) : options_(WithTime(std::move(options))) {}

absl::Status Pace::CheckCancelled() const {
  if (options_.cancelled == nullptr || !options_.cancelled->load()) {
    return absl::OkStatus();
  }
  return absl::CancelledError("writing a checkpoint: it was cancelled");
}

absl::Status Pace::Take(int64_t bytes) {
  FSDP_RETURN_IF_ERROR(CheckCancelled());
  if (options_.bytes_per_second <= 0) return absl::OkStatus();
  absl::Time now = options_.now();
  free_at_ = std::max(free_at_, now);
  while (now < free_at_) {
    options_.sleep(std::min(free_at_ - now, kSlice));
    FSDP_RETURN_IF_ERROR(CheckCancelled());
    now = options_.now();
  }
  free_at_ += absl::Seconds(static_cast<double>(bytes) /
                            static_cast<double>(options_.bytes_per_second));
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
