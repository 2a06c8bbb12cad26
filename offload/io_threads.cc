#include "offload/io_threads.h"

#include <utility>

#include "absl/status/statusor.h"
#include "base/start_thread.h"

namespace fsdp::offload {

absl::Status IoThreads::Start(absl::string_view purpose, int count) {
  while (count-- > 0) {
    absl::StatusOr<std::thread> thread =
        StartThread(purpose, [this] { Work(); });
    if (!thread.ok()) {
      return threads_.empty() ? thread.status() : absl::OkStatus();
    }
    threads_.push_back(*std::move(thread));
  }
  return absl::OkStatus();
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

}  // namespace fsdp::offload
