#include "comm/c10d_backend/c10d_completion.h"

#include <c10/core/GradMode.h>

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "base/start_thread.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/group/c10d_status.h"

namespace fsdp::comm {

C10dCompletion::C10dCompletion(WorkPtr work, std::function<void()> finish)
    : work_(std::move(work)), finish_(std::move(finish)) {}

C10dCompletion::~C10dCompletion() = default;

void C10dCompletion::Run(SideStream& side) {
  status_ = C10dToStatus("a work of c10d failed", [&] {
    const SideStream::Scope scope(side);
    if (work_ != nullptr) work_->wait();
    const c10::NoGradGuard no_grad;
    if (finish_) finish_();
    done_.Record(side.device());
  });
  finish_ = nullptr;
  has_run_.store(true, std::memory_order_release);
}

absl::StatusOr<bool> C10dCompletion::IsDone() const {
  if (has_run()) FSDP_RETURN_IF_ERROR(status_);
  bool done = false;
  FSDP_RETURN_IF_ERROR(C10dToStatus("ask for an event",
                                    [&] { done = has_run() && done_.Done(); }));
  FSDP_RETURN_IF_ERROR(ErrorOfWork());
  return done;
}

bool C10dCompletion::HasLetGo() const {
  if (!has_run()) return false;
  bool done = false;
  const absl::Status asked =
      C10dToStatus("ask for an event", [&] { done = done_.Done(); });
  return done || !asked.ok();
}

// A stream that waits does not tell of errors; the work does when it is asked.
absl::Status C10dCompletion::ErrorOfWork() const {
  if (work_ == nullptr) return absl::OkStatus();
  return C10dToStatus("a work of c10d failed", [&] {
    if (!work_->isCompleted()) return;
    const std::exception_ptr error = work_->exception();
    if (error != nullptr) std::rethrow_exception(error);
  });
}

absl::Status C10dCompletion::BlockCurrentStream() const {
  FSDP_RETURN_IF_ERROR(status_);
  return C10dToStatus("make a stream wait",
                      [&] { done_.BlockCurrentStream(); });
}

C10dCompletionQueue::State::State(c10::Device device)
    : side(device, SideStream::Priority::kHigh) {}

C10dCompletionQueue::C10dCompletionQueue(c10::Device device, bool host_waits)
    : state_(std::make_shared<State>(device)) {
  if (!host_waits) return;
  thread_ = ValueOrThrow(
      StartThread("to wait for a backend", [state = state_] { state->Run(); }));
}

C10dCompletionQueue::~C10dCompletionQueue() { Stop(absl::ZeroDuration()); }

void C10dCompletionQueue::Add(std::shared_ptr<C10dCompletion> completion) {
  if (!thread_.joinable()) {
    completion->Run(state_->side);
    return;
  }
  absl::MutexLock lock(&state_->mutex);
  state_->queue.push_back(std::move(completion));
}

void C10dCompletionQueue::Stop(absl::Duration patience) {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&state_->mutex);
    state_->stopping = true;
    if (!state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended),
                                        patience)) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

void C10dCompletionQueue::State::Run() {
  const auto has_news = [this]() {
    mutex.AssertHeld();
    return stopping || !queue.empty();
  };
  while (true) {
    std::shared_ptr<C10dCompletion> completion;
    {
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&has_news));
      if (queue.empty()) {
        ended = true;
        return;
      }
      completion = std::move(queue.front());
      queue.pop_front();
    }
    completion->Run(side);
  }
}

}  // namespace fsdp::comm
