// Plants and triggers what goes wrong in one attempt of a scenario, and judges
// whether the errors of ranks say it.
#ifndef TESTING_SIMULATION_ATTEMPT_FAULTS_H_
#define TESTING_SIMULATION_ATTEMPT_FAULTS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/files/file_system.h"
#include "testing/simulation/disks.h"
#include "testing/simulation/group.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// Is hooked into the simulation as long as it lives.
class AttemptFaults {
 public:
  AttemptFaults(Simulation& simulation, Network& network,
                const Attempt& attempt);
  AttemptFaults(const AttemptFaults&) = delete;
  AttemptFaults& operator=(const AttemptFaults&) = delete;
  ~AttemptFaults();

  // Plants the faults of rank `rank` before it runs.
  void Plant(int rank, DiskView& disk, SimulatedSsd& ssd);
  // Turns a bit of the newest checkpoint below /run before the ranks run, if
  // that is a fault and there is a checkpoint; turns it back afterwards if the
  // file is still the same one.
  void PlantRot(FileSystem& disk);
  void RemoveRot(FileSystem& disk);
  // Returns Fault::at of the rank's fault of this kind, if it has one.
  std::optional<int64_t> PlaceOf(FaultKind kind, int rank) const;
  // Returns the signal that the rank has been told so far, 0 if none.
  int SignalOf(int rank) const;
  // Returns whether all ranks end with one text: after kSignal and kNotFinite.
  bool AllEndAlike() const;
  // Takes in, after the rank has run, which faults have happened, and when.
  void Collect(int rank, const DiskView& disk, const SimulatedSsd& ssd,
               std::optional<int64_t> thrown_at);

  std::vector<Fault> Happened() const;
  // Ranks may return these as errors.
  bool any_that_may_fail() const;
  bool power_is_lost() const;
  // Returns when the last fault was over.
  absl::Duration last() const { return last_; }

 private:
  void OnEvent(int rank, int64_t number);
  void Trigger(const Fault& fault);
  bool HasHappened(const std::function<bool(const Fault&)>& is_it) const;

  Simulation& simulation_;
  Network& network_;
  const Attempt& attempt_;
  std::vector<bool> happened_;  // by fault
  std::string rotten_path_;
  std::string rotten_bytes_;  // all of the file
  int64_t rotten_bit_ = 0;
  absl::Duration last_;
};

// Returns whether the error tells of this fault: of the cause that it leads to,
// or of its rank if that is lost to the others.
bool IsNamedBy(const Fault& fault, const absl::Status& error);

// Returns the ranks whose errors, at their places in `ends`, tell neither of
// one of these faults nor of a rank that is lost because of them.
std::vector<int> RanksThatSayNothing(const std::vector<Fault>& faults,
                                     const std::vector<absl::Status>& ends);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_ATTEMPT_FAULTS_H_
