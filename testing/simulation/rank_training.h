// One rank of a simulated training.
#ifndef TESTING_SIMULATION_RANK_TRAINING_H_
#define TESTING_SIMULATION_RANK_TRAINING_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/files/file_system.h"
#include "comm/communicator.h"
#include "offload/system_calls.h"
#include "testing/simulation/mutant.h"
#include "testing/simulation/plain_training.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

// Begins errors that no fault explains: the numbers are not plain LibTorch's.
inline constexpr absl::string_view kDiffers = "differs: ";
// A rank's own code throws it (FaultKind::kThrow).
inline constexpr absl::string_view kUsersError = "the user's code has failed";

struct RankWorld {
  const Scenario* scenario;
  // It belongs to the caller.
  comm::Communicator* communicator;
  FileSystem* disk;
  offload::SystemCalls* ssd;
  Mutant mutant = Mutant::kNone;
  std::optional<int64_t> throws_at;  // number of a forward, from 0
  // Returns what plain LibTorch gives from a checkpoint of `step` on, with as
  // many ranks as now; -1: from the start.
  std::function<PlainTraining&(int64_t step)> expected;
  std::function<void(int64_t step)> save_begins;
  // For guarded runs: what this rank has been told, and the steps, from 1, in
  // which its loss is NaN and after which it returns; 0: none.
  std::function<int()> signal;
  int64_t not_finite_step = 0;
  int64_t last_step = 0;
};

struct RankReport {
  absl::Status status;
  int64_t ended_at = -1;  // Simulation::elapsed_nanos(); -1: it has not
  std::optional<int64_t> loaded;
  std::optional<int64_t> saved;      // the newest one that was said to be
  std::optional<int64_t> thrown_at;  // as ended_at
};

// Trains from the newest checkpoint, or the start, to the end, and compares
// every loss, what was loaded and the result with `expected`.
absl::Status TrainRank(const RankWorld& world, RankReport* report);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_RANK_TRAINING_H_
