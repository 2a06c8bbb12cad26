#include "offload/thread_queue.h"

#include <unistd.h>

#include <cerrno>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/file_size_errors.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

int64_t Perform(int descriptor, const IoRequest& request) {
  for (;;) {
    ssize_t result = 0;
    switch (request.kind) {
      case IoRequest::Kind::kRead:
        result = pread(descriptor, request.data, request.bytes, request.offset);
        break;
      case IoRequest::Kind::kWrite:
        result =
            pwrite(descriptor, request.data, request.bytes, request.offset);
        break;
      case IoRequest::Kind::kSync:
        result = fdatasync(descriptor);
        break;
    }
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

class ThreadQueue : public IoQueue {
 public:
  explicit ThreadQueue(int descriptor) : descriptor_(descriptor) {}

  // Before anything else. An error where there are no threads at all.
  absl::Status StartThreads(int depth) {
    while (depth-- > 0) {
      absl::StatusOr<std::thread> thread =
          StartThread("to read and write a file", [this] { Run(); });
      if (!thread.ok()) {
        return threads_.empty() ? thread.status() : absl::OkStatus();
      }
      threads_.push_back(*std::move(thread));
    }
    return absl::OkStatus();
  }

  ~ThreadQueue() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  void Start(IoRequest* request) override {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(request);
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &ThreadQueue::HasNews));
    std::swap(over, over_);
    woken_ = false;
  }

  void Wake() override {
    absl::MutexLock lock(&mutex_);
    woken_ = true;
  }

  int depth() const override { return static_cast<int>(threads_.size()); }
  std::string Describe() const override {
    return absl::StrCat(threads_.size(), " threads");
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return woken_ || !over_.empty();
  }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !waiting_.empty();
  }

  void Run() {
    const FileSizeErrors errors;
    absl::MutexLock lock(&mutex_);
    for (;;) {
      mutex_.Await(absl::Condition(this, &ThreadQueue::HasWork));
      if (waiting_.empty()) return;
      IoRequest* const request = waiting_.front();
      waiting_.pop_front();
      mutex_.Unlock();
      request->result = Perform(descriptor_, *request);
      mutex_.Lock();
      over_.push_back(request);
    }
  }

  const int descriptor_;
  absl::Mutex mutex_;
  std::deque<IoRequest*> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<IoRequest*> over_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(int descriptor,
                                                         int depth) {
  auto queue = absl::make_unique<ThreadQueue>(descriptor);
  FSDP_RETURN_IF_ERROR(queue->StartThreads(depth));
  return queue;
}

}  // namespace fsdp::offload
