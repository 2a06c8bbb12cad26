// Tests of LaunchReplicas() start processes, which play these roles.
#ifndef REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_
#define REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "comm/launcher/launch_options.h"

namespace fsdp::replicas {

// Name environment variables: the role of a process, and the role of the ranks
// of a process that is a launcher of two replicas itself.
inline constexpr char kReplicaRole[] = "REPLICAS_TEST_ROLE";
inline constexpr char kRankRole[] = "REPLICAS_TEST_RANK_ROLE";

// Returns options for two ranks of that role. They are not waited for long,
// except when they have been told to end.
comm::LaunchOptions TwoRanks(const std::string& role);

std::vector<pid_t> ChildrenOf(pid_t pid);

// Plays this process's role and returns the exit code; nullopt for the test
// itself, which has no role.
std::optional<int> PlayReplicaRole();

}  // namespace fsdp::replicas

#endif  // REPLICAS_TESTING_LAUNCH_REPLICAS_ROLES_H_
