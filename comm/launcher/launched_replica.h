// The replica that the ranks of a launcher are, in a job that has several.
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

// Returns the key that a launcher sets to "1" to tell the keeper that an
// incarnation of a replica has ended.
std::string GoneKey(int replica, int incarnation);

// One replica. Each attempt of its ranks is another incarnation.
class LaunchedReplica {
 public:
  // Reads the variables that the ranks get (FSDP_*). Returns nullopt if the
  // ranks are no replica, or InvalidArgument as ReadEnvironment() does.
  static absl::StatusOr<std::optional<LaunchedReplica>> Read(
      GetEnvironmentVariable get);

  std::string name() const;         // "replica 1"
  std::string rank_prefix() const;  // "1.", in front of a rank's number

  // Returns the incarnation after so many restarts.
  int incarnation(int restarts) const {
    return environment_.replica_incarnation + restarts;
  }

  // Tells the keeper that this incarnation has ended. Returns the errors of
  // StoreConnection.
  absl::Status TellEnd(int incarnation, absl::Time deadline) const;

 private:
  explicit LaunchedReplica(Environment environment)
      : environment_(std::move(environment)) {}

  Environment environment_;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHED_REPLICA_H_
