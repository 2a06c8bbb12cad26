// The operations that a group has given to its device, and how the group fails.
// Knows nothing of CUDA, NCCL or tensors.
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
#include "comm/call.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {

// Watches operations until the device has finished them, in the order in which
// they begin. The first failure (a missed deadline, an error of the group or of
// a query, Fail()) ends them all:
// what the device had done by then is done, the rest has failed. Thread-safe.
class OperationWatchdog {
 public:
  // Whether the device has finished an operation; an error where asking fails.
  using Query = std::function<absl::StatusOr<bool>()>;

  // Why the group ended. Peers are told the report; this rank's operations fail
  // with `status` or, without one, with what all ranks' reports amount to.
  struct Failure {
    RankReport report;
    std::optional<absl::Status> status;
  };

  struct Hooks {
    // An error that the group has run into by itself. Called under a lock.
    std::function<absl::Status()> health;
    // Tells the peers and ends what the device still does. Runs once, in the
    // thread that finds the failure, without a lock.
    std::function<void(const Failure& failure)> stop;
    // What Start()'s thread does first; may be empty.
    std::function<void()> enter = {};
  };

  enum class State { kRunning, kDone, kFailed };

  class Operation;

  explicit OperationWatchdog(Hooks hooks);
  // Calls Stop().
  ~OperationWatchdog();

  // Has a thread Poll() every `interval`. Once.
  absl::Status Start(absl::Duration interval);

  // Ends that thread.
  void Stop();

  // The next operation; it has failed if the group has. Runs until the query
  // that Launched() gives says that it is done.
  std::shared_ptr<Operation> Begin(Call call, int64_t bytes,
                                   absl::Time deadline);
  void Launched(Operation& operation, Query is_done);

  // Keeps `what` alive until `operation` is done or has failed.
  void Keep(Operation& operation, std::shared_ptr<void> what);

  // What has become of `operation`; asks the device.
  State StateOf(const Operation& operation);

  // Takes off what is done; fails the group on an error, and where the oldest
  // operation's deadline is before `now`.
  void Poll(absl::Time now);

  // Fails the group unless it has failed.
  void Fail(Failure failure);
  // On behalf of this rank alone: an Unavailable `status` means that a peer is
  // lost, every other one is told to the peers as an abort.
  void Fail(const absl::Status& status);

  // Why the group, which has failed, did; returns when the `stop` hook is over.
  Failure AwaitStopped() const;

  std::optional<Failure> failure() const;

  // Whether nothing runs.
  bool idle() const;

  // "is in all-gather #17 of blocks.2".
  std::string Position() const;

 private:
  // What is let go of when no lock is held and the device has stopped.
  using Released = std::vector<std::shared_ptr<void>>;

  // Whether this has failed the group.
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
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // the hook is over
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;   // the thread is to end
  std::thread thread_;
};

// What it is may be read by any thread, the rest belongs to the watchdog.
class OperationWatchdog::Operation {
 public:
  Operation(Call call, int64_t sequence, int64_t bytes, absl::Time deadline)
      : call_(std::move(call)),
        sequence_(sequence),
        bytes_(bytes),
        deadline_(deadline) {}

  // "all-gather #17 of blocks.2".
  std::string name() const { return Name(call_, sequence_); }

  // "all-gather #17 of blocks.2 on rank 1 of 4 (bfloat16 x 1024, 2048 bytes)",
  // where `place` is "rank 1 of 4".
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

// Until when a rank waits for others.

struct WaitLimits {
  absl::Time deadline;
  // Asked again and again: whether the program is to end. Empty: it is not.
  std::function<bool()> stop_requested = nullptr;
  // The time that `deadline` is of; tests have their own.
  std::function<absl::Time()> now = absl::Now;

  bool stopped() const { return stop_requested && stop_requested(); }
  bool passed() const { return now() >= deadline; }
};

// Tells a rank that another one has aborted their group.

// Hears of an abort whatever this rank does, by a broadcast that rank 0
// withholds: nothing moves, and it ends when a rank aborts the group. Rank 0
// itself hears nothing. Between Begin() and End() the
// group is used for nothing else but Abort(). Used by one thread at a time.
class AbortListener {
 public:
  // `on_failure` gets the broadcast's error, in a thread of the listener.
  AbortListener(Communicator* group,
                std::function<void(const absl::Status&)> on_failure);

  // The group has been aborted, or End() called.
  ~AbortListener();

  // ResourceExhausted: no thread can be started.
  absl::Status Begin();

  // Collective: rank 0 no longer withholds it. The broadcast's error.
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
