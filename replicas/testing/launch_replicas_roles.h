// Tests of LaunchReplicas() start processes, which play these roles.
#ifndef REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_
#define REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_

#include <optional>
#include <string>

#include "comm/launcher/launch_options.h"

namespace fsdp::replicas {

// Environment variables: the role of a process, and the role of the ranks of
// one that is a launcher of two replicas itself.
inline constexpr char kReplicaRole[] = "REPLICAS_TEST_ROLE";
inline constexpr char kRankRole[] = "REPLICAS_TEST_RANK_ROLE";

// Two ranks of that role. They are never waited for long, but where they have
// been told to end.
comm::LaunchOptions TwoRanks(const std::string& role);

// Plays this process's role and returns the exit code; nullopt where it has
// none, since it is the test itself.
std::optional<int> PlayReplicaRole();

}  // namespace fsdp::replicas

#endif  // REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_
