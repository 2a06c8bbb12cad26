// Watches the operations that a group has given to its device, and fails the
// group. Knows nothing of CUDA, NCCL or tensors.
#ifndef COMM_GROUP_OPERATION_WATCHDOG_H_
#define COMM_GROUP_OPERATION_WATCHDOG_H_

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
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {

// Watches operations until the device has finished them, in the order in which
// they begin. The first failure (a missed deadline, an error of the group or of
// a query, Fail()) ends them all: operations that the device had finished by
// then are done, the others have failed. Thread-safe.
class OperationWatchdog {
 public:
  // Returns true once the device has finished an operation, or an error if that
  // cannot be found out.
  using Query = std::function<absl::StatusOr<bool>()>;

  // Why the group ended. The peers get `report`. This rank's operations fail
  // with `status`, or without one with the Verdict() on all ranks' reports.
  struct Failure {
    RankReport report;
    std::optional<absl::Status> status;
  };

  struct Hooks {
    // Returns an error that the group has met by itself. Called under a lock.
    std::function<absl::Status()> health;
    // Tells the peers and ends what the device still does. Called once, in the
    // thread that finds the failure, without a lock.
    std::function<void(const Failure& failure)> stop;
    // Called first in Start()'s thread; may be empty.
    std::function<void()> enter = {};
  };

  enum class State { kRunning, kDone, kFailed };

  class Operation;

  explicit OperationWatchdog(Hooks hooks);
  // Calls Stop().
  ~OperationWatchdog();

  // Starts a thread that calls Poll() every `interval`. Call it once.
  absl::Status Start(absl::Duration interval);

  void Stop();

  // Begins the next operation, which runs until the query that Launched() gives
  // returns true. In a group that has failed it has failed, too.
  std::shared_ptr<Operation> Begin(Call call, int64_t bytes,
                                   absl::Time deadline);
  void Launched(Operation& operation, Query is_done);

  // Keeps `what` alive until `operation` is done or has failed.
  void Keep(Operation& operation, std::shared_ptr<void> what);

  // Asks the device and returns the state of `operation`.
  State StateOf(const Operation& operation);

  // Takes off operations that are done. Fails the group on an error, or if the
  // oldest operation's deadline is before `now`.
  void Poll(absl::Time now);

  // Fails the group unless it has failed.
  void Fail(Failure failure);
  // Fails the group on behalf of this rank. An Unavailable `status` means that
  // a peer is lost; with another one the peers hear that this rank has aborted.
  void Fail(const absl::Status& status);

  // Waits until the `stop` hook of a failed group is over. Returns the failure.
  Failure AwaitStopped() const;

  std::optional<Failure> failure() const;

  bool idle() const;

  // Returns "is in all-gather #17 of blocks.2".
  std::string Position() const;

 private:
  // Objects to release once no lock is held and the device has stopped.
  using Released = std::vector<std::shared_ptr<void>>;

  // Returns true if this call has failed the group.
  bool CheckLocked(absl::Time now, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeOffDoneLocked(Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FailLocked(Failure failure, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string PositionLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopDevice();
  void Run(absl::Duration interval);

  const Hooks hooks_;
  mutable absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<Operation>> running_ ABSL_GUARDED_BY(mutex_);
  std::string last_done_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // `stop` has returned
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;   // the thread is to end
  std::thread thread_;
};

// Any thread may read the name of an operation; only the watchdog uses the
// rest.
class OperationWatchdog::Operation {
 public:
  Operation(Call call, int64_t sequence, int64_t bytes, absl::Time deadline)
      : call_(std::move(call)),
        sequence_(sequence),
        bytes_(bytes),
        deadline_(deadline) {}

  // Returns "all-gather #17 of blocks.2".
  std::string name() const { return Name(call_, sequence_); }

  // Returns "all-gather #17 of blocks.2 on rank 1 of 4 (bfloat16 x 1024, 2048
  // bytes)", where `place` is "rank 1 of 4".
  std::string Describe(absl::string_view place) const;

 private:
  friend class OperationWatchdog;

  const Call call_;
  const int64_t sequence_;
  const int64_t bytes_;
  const absl::Time deadline_;
  Query is_done_;
  std::shared_ptr<void> kept_;
  State state_ = State::kRunning;
};

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

// Tells a rank that another one has aborted their group, whatever this rank is
// doing: it waits for a broadcast that rank 0 does not send before End(), and
// that fails when a rank aborts the group. Rank 0 is not told. Between Begin()
// and End() the group may only be aborted. Used by one thread at a time.
class AbortListener {
 public:
  // `on_failure` gets the broadcast's error, in a thread of the listener.
  AbortListener(Communicator* group,
                std::function<void(const absl::Status&)> on_failure);

  // Destroy it after End(), or once the group has been aborted.
  ~AbortListener();

  // Starts to listen. ResourceExhausted: no thread can be started.
  absl::Status Begin();

  // Collective: rank 0 sends the broadcast. Returns the broadcast's error.
  absl::Status End();

 private:
  void Join();

  Communicator* const group_;
  const std::function<void(const absl::Status&)> on_failure_;
  absl::Status result_;  // of thread_
  std::thread thread_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_OPERATION_WATCHDOG_H_
