// The files in which a rank's tiers rest, with reads and writes that take
// simulated time.
#ifndef TESTING_SIMULATION_SIMULATED_SSD_H_
#define TESTING_SIMULATION_SIMULATED_SSD_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "offload/system_calls.h"
#include "testing/simulation/mutant.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// Keeps files in memory. Requests are over in any order, and move their bytes
// when they start or when they are over. Outlives its queues.
class SimulatedSsd : public offload::SystemCalls {
 public:
  SimulatedSsd(Simulation& simulation, Mutant mutant)
      : simulation_(simulation), mutant_(mutant) {}

  // Makes a new file for any `path`.
  int Open(const std::string& path, int flags) override;
  int64_t FreeBytes(int descriptor) override;
  int Allocate(int descriptor, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<offload::IoQueue>> MakeQueue(
      offload::QueueKind kind, int descriptor, int depth) override;

  // Request number `request`, from 0, fails with EIO; or it is a write that is
  // done in part and said to be whole; or it is done in part and says so.
  void Fail(int64_t request);
  void Tear(int64_t request);
  void Shorten(int64_t request);
  // Returns Simulation::elapsed_nanos() of that request.
  std::optional<int64_t> failed_at() const { return failed_at_; }

 private:
  class Queue;

  Simulation& simulation_;
  const Mutant mutant_;
  // By descriptors of the system, whose files are empty.
  std::map<int, std::shared_ptr<std::vector<char>>> files_;
  int64_t requests_ = 0;
  int64_t fails_at_ = -1;
  int64_t tears_at_ = -1;
  int64_t shortens_at_ = -1;
  std::optional<int64_t> failed_at_;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SIMULATED_SSD_H_
