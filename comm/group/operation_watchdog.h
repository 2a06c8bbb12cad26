// Watches the operations that a group has given to its device or to another
// library, and ends the group after a failure. Knows nothing of CUDA or NCCL.
#ifndef COMM_GROUP_OPERATION_WATCHDOG_H_
#define COMM_GROUP_OPERATION_WATCHDOG_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {

// The limits of a wait for other ranks.
struct WaitLimits {
  absl::Time deadline;
  // Called again and again; true says that the program is to end. May be empty.
  std::function<bool()> stop_requested = nullptr;
  // The clock of `deadline`, which tests replace.
  std::function<absl::Time()> now = absl::Now;

  bool stopped() const { return stop_requested && stop_requested(); }
  bool passed() const { return now() >= deadline; }
};

// Watches operations until the device has finished them, in the order in which
// they begin. The first failure (a missed deadline, an error of the group or of
// a query, Abort(), Fail(), a peer's) ends the group: operations that the
// device had finished by then are done, the others fail with the cause, as far
// as the ranks can find it out together. Thread-safe, except that the caller
// orders the calls of Begin() and Launched().
class WatchedGroup {
 public:
  // Returns true once the device has finished an operation, or an error if that
  // cannot be found out.
  using Query = std::function<absl::StatusOr<bool>()>;

  struct Options {
    int rank = 0;
    RankNames names;
    absl::Duration timeout = absl::Minutes(5);
    // A failed operation waits this long for the reports of the peers.
    absl::Duration diagnosis_timeout = absl::Seconds(2);
  };

  struct Hooks {
    // Returns an error that the group has met by itself. Called under a lock.
    std::function<absl::Status()> health;
    // Ends what the device still does; the peers know by then. Called once, in
    // the thread that finds the failure, without a lock.
    std::function<void()> stop;
    // Called first in Start()'s thread; may be empty.
    std::function<void()> enter = {};
  };

  enum class State { kRunning, kDone, kFailed };

  class Operation;

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
  void Launched(Operation& operation, Query is_done);
  // The operation could not be started, which fails the group. Returns the
  // operation's error.
  absl::Status NotLaunched(const Operation& operation, const absl::Status& why);
  // Keeps `what` alive until `operation` is done or has failed.
  void Keep(Operation& operation, std::shared_ptr<void> what);

  // Asks the device and returns the state of `operation`.
  State StateOf(const Operation& operation);
  // Takes off operations that are done. Fails the group on an error, or if the
  // oldest operation's deadline is before `now`. Start()'s thread calls it.
  void Poll(absl::Time now);
  bool idle() const;  // no operation runs

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  // Returns the error of an operation that has failed, else OK. Waits only for
  // the diagnosis.
  absl::Status Check(const Operation& operation);

  // Both fail the group on behalf of this rank; Fail() returns when nothing
  // runs. An Unavailable `status` means that a peer is lost; with another one
  // the peers hear that this rank has aborted.
  void Abort(const absl::Status& reason);
  void Fail(const absl::Status& status);
  bool failed() const;

  // Leaves the group: ends operations that are not done within `patience`,
  // which fails the peers' operations that need this rank, and calls `close`
  // once nothing runs. Only the first call counts.
  void Leave(absl::Duration patience, absl::FunctionRef<void()> close);

 private:
  // Why the group ended. The peers get `report`. This rank's operations fail
  // with `status`, or without one with the Verdict() on all ranks' reports.
  struct Failure {
    RankReport report;
    std::optional<absl::Status> status = std::nullopt;
  };
  // Objects to release once no lock is held and the device has stopped.
  using Released = std::vector<std::shared_ptr<void>>;

  static Failure OwnFailure(const absl::Status& status);

  absl::Status TakeOffDoneLocked(Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns true if this call has failed the group.
  bool FailLocked(Failure failure, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string PositionLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Watch();
  void StopWatching();
  // Fails the group unless it has failed.
  void FailWith(Failure failure);
  void StopDevice();
  // Waits until the device of a failed group is stopped. Returns the failure.
  Failure AwaitStopped() const;
  absl::Status ErrorOf(const Operation& operation);
  absl::Status FindVerdict();

  const Options options_;
  const Hooks hooks_;
  const std::unique_ptr<ReportExchange> reports_;

  mutable absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<Operation>> running_ ABSL_GUARDED_BY(mutex_);
  std::string last_done_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // StopDevice() is over
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;  // the thread is to end
  std::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// Any thread may read the name of an operation; only the group uses the rest.
class WatchedGroup::Operation {
 public:
  Operation(Call call, int64_t sequence, int64_t bytes, absl::Time deadline)
      : call_(std::move(call)),
        sequence_(sequence),
        bytes_(bytes),
        deadline_(deadline) {}

  // Returns "all-gather #17 of blocks.2".
  std::string name() const { return Name(call_, sequence_); }

 private:
  friend class WatchedGroup;

  const Call call_;
  const int64_t sequence_;
  const int64_t bytes_;
  const absl::Time deadline_;
  Query is_done_;
  std::shared_ptr<void> kept_;
  State state_ = State::kRunning;
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
    absl::Status status = group_->BlockCurrentStream(*operation_);
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

#endif  // COMM_GROUP_OPERATION_WATCHDOG_H_
