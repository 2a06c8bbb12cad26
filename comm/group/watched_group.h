// One rank's end of a group whose operations another library runs on its own.
#ifndef COMM_GROUP_WATCHED_GROUP_H_
#define COMM_GROUP_WATCHED_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_watchdog.h"

namespace fsdp::comm {

// Watches operations, and ends the group on the first failure, its own or a
// peer's. The operations then fail with the cause, as far as the ranks can find
// it out together. Knows no device. Thread-safe, except that the caller orders
// the calls of Begin() and Launched().
class WatchedGroup {
 public:
  using Operation = OperationWatchdog::Operation;

  struct Options {
    int rank = 0;
    RankNames names;
    absl::Duration timeout = absl::Minutes(5);
    // A failed operation waits this long for the reports of the peers.
    absl::Duration diagnosis_timeout = absl::Seconds(2);
  };

  struct Hooks {
    // Returns an error that the library has met by itself. Called under a lock.
    std::function<absl::Status()> health;
    // Ends all operations that run. Called once at most, in any thread.
    std::function<void()> stop;
    // Called first in the thread that watches; may be empty.
    std::function<void()> enter = {};
  };

  // `reports` has not been started.
  WatchedGroup(std::unique_ptr<ReportExchange> reports, const Options& options,
               Hooks hooks);
  // No hook is called after it.
  ~WatchedGroup();

  // Starts to watch and to call hooks; call it once. ResourceExhausted: no
  // thread can be started.
  absl::Status Start();

  int rank() const { return options_.rank; }
  int world_size() const { return options_.names.size(); }
  const RankNames& names() const { return options_.names; }
  absl::Duration timeout() const { return options_.timeout; }

  // Returns "all-gather #17 of blocks.2 on rank 1 of 4 (bfloat16 x 1024, 2048
  // bytes)".
  std::string Describe(const Operation& operation) const;

  // Begins the next operation, which is due in timeout(). Returns the error of
  // a group that has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Begin(Call call, int64_t bytes);
  // The operation runs until `is_done` returns true.
  void Launched(Operation& operation, OperationWatchdog::Query is_done);
  // The operation could not be started, which fails the group. Returns the
  // operation's error.
  absl::Status NotLaunched(const Operation& operation, const absl::Status& why);

  // Keeps `what` alive until `operation` is done or has failed.
  void Keep(Operation& operation, std::shared_ptr<void> what);

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline);

  // Returns the error of an operation that has failed, else OK. Waits only for
  // the diagnosis.
  absl::Status Check(const Operation& operation);

  // Both fail the group on behalf of this rank; Fail() returns when nothing
  // runs.
  void Abort(const absl::Status& reason);
  void Fail(const absl::Status& status);

  bool failed() const { return watchdog_.failure().has_value(); }

  // Leaves the group: ends operations that are not done within `patience`,
  // which fails the peers' operations that need this rank, and calls `close`
  // once nothing runs. Only the first call counts.
  void Leave(absl::Duration patience, absl::FunctionRef<void()> close);

 private:
  void StopAll(const OperationWatchdog::Failure& failure);
  // Waits until nothing runs or `deadline` has passed. The group may fail
  // meanwhile.
  void AwaitIdle(absl::Time deadline);
  absl::Status ErrorOf(const Operation& operation);
  absl::Status FindVerdict();

  const Options options_;
  const std::function<void()> stop_;
  const std::unique_ptr<ReportExchange> reports_;
  absl::Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its thread ends first.
  OperationWatchdog watchdog_;
};

// A started operation of a group that runs on a stream of a device.
//
// `Group` has a type Operation and
//   absl::Status Wait(const Operation&, absl::Time deadline)
//   absl::Status BlockCurrentStream(const Operation&)
// with the errors of Work's methods, and
//   void Keep(const Operation&, std::vector<at::Tensor>)
// for tensors that the device may still use when nobody waits any more. The
// work keeps the group alive.
//
// After Wait() the tensors are free. After BlockCurrentStream() they are the
// caller's, in the order of that stream. A work that is destroyed after neither
// hands them to the group. BlockCurrentStream() after Wait() asks nothing of
// the device: while the current stream is captured into a graph, it may not
// wait for operations that began before.
template <typename Group>
class StreamWork final : public Work {
 public:
  StreamWork(std::shared_ptr<Group> group,
             std::shared_ptr<typename Group::Operation> operation,
             std::vector<at::Tensor> tensors)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        tensors_(std::move(tensors)) {}
  ~StreamWork() override {
    if (!is_ordered_) group_->Keep(*operation_, std::move(tensors_));
  }

  absl::Status Wait(absl::Time deadline) override {
    if (!result_) {
      result_ = group_->Wait(*operation_, deadline);
      is_ordered_ = true;
      tensors_.clear();
    }
    return *result_;
  }

  absl::Status BlockCurrentStream() override {
    if (result_) return *result_;
    const absl::Status status = group_->BlockCurrentStream(*operation_);
    is_ordered_ = is_ordered_ || status.ok();
    return status;
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<typename Group::Operation> operation_;
  std::vector<at::Tensor> tensors_;
  bool is_ordered_ = false;  // nobody frees the tensors too early
  std::optional<absl::Status> result_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_WATCHED_GROUP_H_
