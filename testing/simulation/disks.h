// The disk of a simulation as one rank sees it, and the files in which the
// rank's tiers rest.
#ifndef TESTING_SIMULATION_DISKS_H_
#define TESTING_SIMULATION_DISKS_H_

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "offload/system_calls.h"
#include "testing/simulation/mutant.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// Calls are events, take time, and fail when they are told to; those of a dead
// process reach nothing.
class DiskView : public ::fsdp::testing::ForwardingFileSystem {
 public:
  DiskView(Simulation& simulation, FileSystem& disk, int process, Mutant mutant)
      : ::fsdp::testing::ForwardingFileSystem(disk),
        simulation_(simulation),
        process_(process),
        mutant_(mutant) {}

  // Makes change number `call` of this rank, from 0, and all after it if
  // `for_good`, fail with `error`, an errno.
  void Fail(int64_t call, int error, bool for_good) {
    fails_at_ = call;
    error_ = error;
    for_good_ = for_good;
  }
  // From now on reads and writes are made in parts, as by a system that moves
  // less than it is asked to, or nothing when it is interrupted.
  void MoveInParts() { in_parts_ = true; }
  // Returns Simulation::elapsed_nanos() of the first call that has failed.
  std::optional<int64_t> failed_at() const { return failed_at_; }

  absl::StatusOr<std::unique_ptr<File>> OpenForReading(
      const std::string& path, Caching caching) override;
  absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) override;
  absl::Status SyncFolder(const std::string& path) override;

 private:
  class FileView;

  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override;
  absl::Status BeforeReading(const std::string& path) override;

  Simulation& simulation_;
  const int process_;
  const Mutant mutant_;
  bool in_parts_ = false;
  bool is_late_write_ = false;
  int64_t changes_ = 0;
  int64_t fails_at_ = -1;
  int error_ = 0;
  bool for_good_ = false;
  std::optional<int64_t> failed_at_;
};

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
  int BypassCache(int /*descriptor*/) override { return EINVAL; }
  absl::StatusOr<std::unique_ptr<offload::IoQueue>> MakeQueue(
      offload::QueueKind kind, int descriptor, int depth) override;

  // Request number `request`, from 0, fails with EIO; or it is a write that is
  // done in part and said to be whole; or it is done in part and says so.
  void Fail(int64_t request) { fails_at_ = request; }
  void Tear(int64_t request) { tears_at_ = request; }
  void Shorten(int64_t request) { shortens_at_ = request; }
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

#endif  // TESTING_SIMULATION_DISKS_H_
