// Which replica the ranks of a launcher are, where a job has several.
#ifndef COMM_LAUNCHER_LAUNCHED_REPLICA_H_
#define COMM_LAUNCHER_LAUNCHED_REPLICA_H_

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// The key by which launchers tell the keeper that an incarnation of a replica
// has ended; its value is "1".
std::string GoneKey(int replica, int incarnation);

// Each attempt of its ranks is another incarnation.
class LaunchedReplica {
 public:
  // What the variables say that the ranks get, FSDP_JOB_SECRET included;
  // nullopt: they are no replica. InvalidArgument as of ReadEnvironment().
  static absl::StatusOr<std::optional<LaunchedReplica>> Read(
      GetEnvironmentVariable get);

  std::string name() const;         // "replica 1"
  std::string rank_prefix() const;  // "1.", in front of a rank's number

  // After so many restarts.
  int incarnation(int restarts) const {
    return environment_.replica_incarnation + restarts;
  }

  // Tells the keeper that this incarnation has ended. Errors as of
  // StoreConnection.
  absl::Status TellEnd(int incarnation, absl::Time deadline) const;

 private:
  explicit LaunchedReplica(Environment environment)
      : environment_(std::move(environment)) {}

  Environment environment_;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHED_REPLICA_H_
