// Operations of one rank that run one after the other, on a thread of their
// own.
#ifndef COMM_GROUP_OPERATION_QUEUE_H_
#define COMM_GROUP_OPERATION_QUEUE_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/work.h"

namespace fsdp::comm {

// Knows whether an operation has succeeded, not why it has failed: that is its
// owner's to remember, who cancels the queue then. Thread-safe. May be called
// with a lock held that operations take: it holds none of its own while they
// run.
class OperationQueue {
 public:
  // What an operation does once it is its turn. Dropped, with what it holds,
  // before anyone is told that the operation is done.
  using Run = std::function<absl::Status()>;
  class Operation;

  OperationQueue() = default;
  // Cancels what has not begun and waits for what has.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // Starts the thread, `purpose` as of StartThread(). Once. ResourceExhausted:
  // no thread can be started.
  absl::Status Start(absl::string_view purpose);

  // Queues an operation, whose name is for NameOf() and Position(); nullptr
  // once the queue has been cancelled.
  std::shared_ptr<Operation> Post(std::string name, Run run);

  static const std::string& NameOf(const Operation& operation);

  // Whether `operation` is done, with or without an error, or cancelled.
  bool IsDone(const Operation& operation);

  // Waits until it is and returns whether it has succeeded. Where it is not at
  // `deadline`, calls `give_up`, which is to end it, and stays for up to
  // `let_go` for the thread to let go of its buffers.
  bool Wait(const Operation& operation, absl::Time deadline,
            absl::FunctionRef<void()> give_up, absl::Duration let_go);

  // Nothing begins any more: what waits for its turn is done without success.
  // Returns Position() at that moment.
  std::string Cancel();

  // "is in all-gather #17 of blocks.2", "has finished all-gather #17 of
  // blocks.2 and called nothing since", "has called nothing yet".
  std::string Position();

  // The operation that runs, or else the next one; "nothing".
  std::string NameOfNext();

  // What the queue was at when its owner began to end it.
  struct Farewell {
    bool unfinished = false;
    std::string position;
  };
  // Nothing is posted any more: the thread ends when it has nothing to do.
  // Nullopt but for the first call.
  std::optional<Farewell> Finish();
  // Waits for that.
  void Join();

 private:
  void RunAll();
  std::string PositionLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  std::deque<std::shared_ptr<Operation>> queue_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Operation> current_ ABSL_GUARDED_BY(mutex_);
  std::string last_finished_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// A started operation of a backend that keeps its own groups.

// `Group` has a type Operation and Wait(Operation&, absl::Time), with the
// errors of Work::Wait(), for which this keeps it alive.
template <typename Group>
class GroupWork final : public Work {
 public:
  GroupWork(std::shared_ptr<Group> group,
            std::shared_ptr<typename Group::Operation> operation,
            absl::Duration timeout)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        timeout_(timeout) {}

  absl::Status Wait(absl::Time deadline) override {
    return group_->Wait(*operation_, deadline);
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<typename Group::Operation> operation_;
  const absl::Duration timeout_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_OPERATION_QUEUE_H_
