// Lets SIGQUIT and SIGUSR1 ask what this rank is doing.
#ifndef COMM_INSPECTION_INSPECTION_SIGNALS_H_
#define COMM_INSPECTION_INSPECTION_SIGNALS_H_

#include <signal.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {

// While it exists, SIGQUIT and SIGUSR1 do not end the process but make it write
// the phase, the last operations and the memory of the rank
// (RankActivity::Describe()), on a thread of its own.
class InspectionSignals {
 public:
  // Appends to files "rank-N.txt" in `folder`, or writes to standard error if
  // `folder` is empty. RunRanks() calls it; other programs call it once. A
  // handler that the program has for SIGUSR1 stays. FailedPrecondition: the
  // program has a handler for SIGQUIT or there is another InspectionSignals;
  // nothing is installed. ResourceExhausted: no thread or descriptor is left.
  static absl::StatusOr<std::unique_ptr<InspectionSignals>> Install(
      const std::string& folder = "");

  // Restores the previous handlers, except those that the program has set
  // since.
  ~InspectionSignals();
  InspectionSignals(const InspectionSignals&) = delete;
  InspectionSignals& operator=(const InspectionSignals&) = delete;

  // From now on answers are those of `ranks`, which Connect() has returned,
  // even after its end. Thread-safe.
  void Show(const Communicator& ranks);

 private:
  explicit InspectionSignals(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Start();
  void Answer();
  void Write(int rank, const std::string& text) const;

  const std::string folder_;
  int fd_ = -1;
  // SIGQUIT and SIGUSR1 in this order: is the signal this object's, and who had
  // it before?
  std::array<bool, 2> taken_ = {};
  std::array<struct sigaction, 2> previous_ = {};
  std::thread thread_;
  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RankActivity> activity_ ABSL_GUARDED_BY(mutex_);
  int rank_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTION_SIGNALS_H_
