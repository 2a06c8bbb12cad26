// SIGQUIT and SIGUSR1 as the question what this rank is doing.
#ifndef COMM_INSPECTION_INSPECTION_SIGNALS_H_
#define COMM_INSPECTION_INSPECTION_SIGNALS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// While it exists, SIGQUIT and SIGUSR1 do not end the process but make it write
// what it is doing, on a thread that is there for that: the phase, the last
// operations and the memory of the rank (RankActivity::Describe()).
class InspectionSignals {
 public:
  // To `folder` as files "rank-N.txt", which are appended to; empty: on
  // standard error. RunRanks() calls it; other programs call it once. A handler
  // of the program for SIGUSR1 stays. FailedPrecondition: so does one for
  // SIGQUIT, and nothing is installed; or there is another InspectionSignals.
  // ResourceExhausted: no thread or descriptor is left.
  static absl::StatusOr<std::unique_ptr<InspectionSignals>> Install(
      const std::string& folder = "");

  // What was is restored, unless the program has set something since.
  ~InspectionSignals();
  InspectionSignals(const InspectionSignals&) = delete;
  InspectionSignals& operator=(const InspectionSignals&) = delete;

  // What Connect() has returned is asked from now on, as long as it lives and a
  // little longer. Thread-safe.
  void Show(const Communicator& ranks);

 private:
  class State;

  explicit InspectionSignals(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTION_SIGNALS_H_
