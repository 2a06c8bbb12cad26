// Runs the operations of one rank one after the other, on a thread of their
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
#include "comm/communicator.h"

namespace fsdp::comm {

// Knows that an operation has failed, but not why: its owner remembers that,
// and cancels the queue. Thread-safe. Callers may hold a lock that operations
// take, since the queue holds no lock while they run.
class OperationQueue {
 public:
  // Runs an operation when it is its turn. It is destroyed, with what it holds,
  // before anyone is told that the operation is done.
  using Run = std::function<absl::Status()>;
  // `run` belongs to the thread once posted; `done` and `succeeded` are guarded
  // by the queue's mutex.
  struct Operation {
    const std::string name;
    Run run;
    bool done = false;
    bool succeeded = false;
  };

  OperationQueue() = default;
  // Cancels what has not begun and waits for what has.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // Starts the thread; call it once. `purpose` is that of StartThread().
  // ResourceExhausted: no thread can be started.
  absl::Status Start(absl::string_view purpose);

  // Queues an operation. Returns nullptr once the queue has been cancelled.
  std::shared_ptr<Operation> Post(std::string name, Run run);

  // True once `operation` has succeeded, failed or been cancelled.
  bool IsDone(const Operation& operation);

  // Waits until it is done and returns true if it has succeeded. If it is not
  // done at `deadline`, calls `give_up`, which has to end it, and waits up to
  // `let_go` more until the thread has released its buffers.
  bool Wait(const Operation& operation, absl::Time deadline,
            absl::FunctionRef<void()> give_up, absl::Duration let_go);

  // Lets no further operation begin; those that wait for their turn fail.
  // Returns the position at that moment: "is in all-gather #17 of blocks.2",
  // "has finished all-gather #17 of blocks.2 and called nothing since" or "has
  // called nothing yet".
  std::string Cancel();

  // Returns the name of the operation that runs, else of the next one, else
  // "nothing".
  std::string NameOfNext();

  // The state of the queue when its owner begins to end it.
  struct Farewell {
    bool unfinished = false;
    std::string position;
  };
  // Lets the thread end when it has nothing to do. Nothing may be posted any
  // more. Only the first call returns a Farewell.
  std::optional<Farewell> Finish();
  // Waits for the end of the thread.
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

// A started operation of a backend whose `Group` has a type Operation and
// Wait(Operation&, absl::Time), with the errors of Work::Wait(). Keeps the
// group alive.
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
