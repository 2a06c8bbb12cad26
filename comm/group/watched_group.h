// One rank's end of a group whose operations another library runs on its own.
#ifndef COMM_GROUP_WATCHED_GROUP_H_
#define COMM_GROUP_WATCHED_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/call.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_watchdog.h"

namespace fsdp::comm {

// Sees when operations are done, ends the group on the first failure, its own
// or a peer's, and tells every operation that fails by it what it was, as far
// as the ranks can find out together. Knows no device. Thread-safe, but for
// Begin() and Launched(), whose order is the caller's.
class WatchedGroup {
 public:
  using Operation = OperationWatchdog::Operation;

  struct Options {
    int rank = 0;
    RankNames names;
    absl::Duration timeout = absl::Minutes(5);
    // How long a failed operation waits for what the peers have to say.
    absl::Duration diagnosis_timeout = absl::Seconds(2);
  };

  struct Hooks {
    // An error that the library has run into by itself. Called under a lock.
    std::function<absl::Status()> health;
    // Ends what runs, after which nothing does. Runs once at most, in any
    // thread.
    std::function<void()> stop;
    // What the thread that watches does first; may be empty.
    std::function<void()> enter = {};
  };

  // `reports` has not been started.
  WatchedGroup(std::unique_ptr<ReportExchange> reports, const Options& options,
               Hooks hooks);
  // Calls no hook any more.
  ~WatchedGroup();

  // From now on hooks are called. Once. ResourceExhausted: no thread can be
  // started.
  absl::Status Start();

  int rank() const { return options_.rank; }
  int world_size() const { return options_.names.size(); }
  const RankNames& names() const { return options_.names; }
  absl::Duration timeout() const { return options_.timeout; }

  // "all-gather #17 of blocks.2 on rank 1 of 4 (bfloat16 x 1024, 2048 bytes)".
  std::string Describe(const Operation& operation) const;

  // The next operation, due in timeout(); the error of a group that has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Begin(Call call, int64_t bytes);
  // It runs until `is_done` says otherwise.
  void Launched(Operation& operation, OperationWatchdog::Query is_done);
  // It does not, which fails the group: the operation's error.
  absl::Status NotLaunched(const Operation& operation, const absl::Status& why);

  // Keeps `what` alive until `operation` is done or has failed.
  void Keep(Operation& operation, std::shared_ptr<void> what);

  // As Work::Wait().
  absl::Status Wait(const Operation& operation, absl::Time deadline);

  // The error of an operation that has failed; waits for nothing else.
  absl::Status Check(const Operation& operation);

  // Fails the group on this rank's behalf; Fail() returns when nothing runs.
  void Abort(const absl::Status& reason);
  void Fail(const absl::Status& status);

  bool failed() const { return watchdog_.failure().has_value(); }

  // Makes no more calls: what does not come to an end within `patience` is
  // ended, and the peers' operations that need this rank fail. `close` is for
  // when nothing runs any more. Only the first call counts.
  void Leave(absl::Duration patience, absl::FunctionRef<void()> close);

 private:
  void StopAll(const OperationWatchdog::Failure& failure);
  // Until nothing runs, the group having failed perhaps.
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

}  // namespace fsdp::comm

#endif  // COMM_GROUP_WATCHED_GROUP_H_
