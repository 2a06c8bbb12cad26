#include "comm/group/operation_queue.h"

#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {

OperationQueue::~OperationQueue() {
  Cancel();
  Finish();
  Join();
}

absl::Status OperationQueue::Start(absl::string_view purpose) {
  FSDP_ASSIGN_OR_RETURN(thread_, StartThread(purpose, [this] { RunAll(); }));
  return absl::OkStatus();
}

std::shared_ptr<OperationQueue::Operation> OperationQueue::Post(
    std::string name, Run run) {
  auto operation =
      std::make_shared<Operation>(Operation{std::move(name), std::move(run)});
  absl::MutexLock lock(&mutex_);
  if (cancelled_) return nullptr;
  queue_.push_back(operation);
  return operation;
}

bool OperationQueue::IsDone(const Operation& operation) {
  absl::MutexLock lock(&mutex_);
  return operation.done;
}

bool OperationQueue::Wait(const Operation& operation, absl::Time deadline,
                          absl::FunctionRef<void()> give_up,
                          absl::Duration let_go) {
  const absl::Condition is_done(&operation.done);
  bool in_time = false;
  {
    absl::MutexLock lock(&mutex_);
    in_time = mutex_.AwaitWithDeadline(is_done, deadline);
  }
  if (!in_time) give_up();
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(is_done, let_go);
  return operation.succeeded;
}

std::string OperationQueue::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  return PositionLocked();
}

std::string OperationQueue::NameOfNext() {
  absl::MutexLock lock(&mutex_);
  if (current_ != nullptr) return current_->name;
  return queue_.empty() ? "nothing" : queue_.front()->name;
}

std::optional<OperationQueue::Farewell> OperationQueue::Finish() {
  absl::MutexLock lock(&mutex_);
  if (finishing_) return std::nullopt;
  finishing_ = true;
  return Farewell{current_ != nullptr || !queue_.empty(), PositionLocked()};
}

void OperationQueue::Join() {
  if (thread_.joinable()) thread_.join();
}

void OperationQueue::RunAll() {
  const auto has_news = [this]() {
    mutex_.AssertHeld();
    return finishing_ || !queue_.empty();
  };
  while (true) {
    std::shared_ptr<Operation> operation;
    bool cancelled = false;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (queue_.empty()) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
      current_ = operation;
      cancelled = cancelled_;
    }
    const bool succeeded = !cancelled && operation->run().ok();
    // Comes before anyone is told, since waiters then use the buffers again.
    operation->run = nullptr;
    absl::MutexLock lock(&mutex_);
    current_ = nullptr;
    if (succeeded) last_finished_ = operation->name;
    operation->succeeded = succeeded;
    operation->done = true;
  }
}

std::string OperationQueue::PositionLocked() const {
  if (current_ != nullptr) return absl::StrCat("is in ", current_->name);
  if (last_finished_.empty()) return "has called nothing yet";
  return absl::StrCat("has finished ", last_finished_,
                      " and called nothing since");
}

}  // namespace fsdp::comm
