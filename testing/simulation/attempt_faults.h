// What goes wrong in one attempt of a scenario: planted and triggered.
#ifndef TESTING_SIMULATION_ATTEMPT_FAULTS_H_
#define TESTING_SIMULATION_ATTEMPT_FAULTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/files/file_system.h"
#include "testing/simulation/disk_view.h"
#include "testing/simulation/group.h"
#include "testing/simulation/rot.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/simulated_ssd.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// Hooked into the simulation as long as it lives.
class AttemptFaults {
 public:
  AttemptFaults(Simulation& simulation, Network& network,
                const Attempt& attempt);
  AttemptFaults(const AttemptFaults&) = delete;
  AttemptFaults& operator=(const AttemptFaults&) = delete;
  ~AttemptFaults();

  // Of rank `rank`, before it runs.
  void Plant(int rank, DiskView& disk, SimulatedSsd& ssd);
  // Of what is on the disk, before the ranks run; undone afterwards.
  void PlantRot(checkpoint::FileSystem& disk);
  void RemoveRot(checkpoint::FileSystem& disk);
  std::optional<int64_t> ThrowsAt(int rank) const;
  // The step of the rank's kNotFinite or kFinish; 0: it has none.
  int64_t StepOf(FaultKind kind, int rank) const;
  // What the rank has been told so far; 0: nothing.
  int SignalOf(int rank) const;
  // Whether all ranks have to end with one text: after kSignal and kNotFinite.
  bool AllEndAlike() const;
  // After it has run: which of these have happened, and when.
  void Collect(int rank, const DiskView& disk, const SimulatedSsd& ssd,
               std::optional<int64_t> thrown_at);

  // What has happened.
  std::vector<Fault> Happened() const;
  // That ranks may return as an error.
  bool any_that_may_fail() const;
  bool power_is_lost() const;
  // When the last one was over.
  absl::Duration last() const { return last_; }

 private:
  void OnEvent(int rank, int64_t number);
  void Trigger(const Fault& fault);

  Simulation& simulation_;
  Network& network_;
  const Attempt& attempt_;
  std::vector<bool> happened_;  // by fault
  Rot rot_;
  absl::Duration last_;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_ATTEMPT_FAULTS_H_
