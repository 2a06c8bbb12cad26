// The roles of processes that launcher_test starts.
#ifndef COMM_TESTING_LAUNCHER_ROLES_H_
#define COMM_TESTING_LAUNCHER_ROLES_H_

#include <optional>

namespace fsdp::comm {

// Environment variables, in this order: the role of a process; the role of the
// ranks of a process that is a launcher itself; the path of a FIFO; a signal
// that a launcher ignores from its start; if set, SIGUSR1 ends the job; if set,
// "train" fails to stop; how often a launcher restarts its ranks, after
// a pause of an hour each, by default never.
inline constexpr char kRole[] = "LAUNCHER_TEST_ROLE";
inline constexpr char kNestedRole[] = "LAUNCHER_TEST_NESTED_ROLE";
inline constexpr char kFifo[] = "LAUNCHER_TEST_FIFO";
inline constexpr char kIgnoredSignal[] = "LAUNCHER_TEST_IGNORED_SIGNAL";
inline constexpr char kEndsByUsr1[] = "LAUNCHER_TEST_ENDS_BY_USR1";
inline constexpr char kFailsToStop[] = "LAUNCHER_TEST_FAILS_TO_STOP";
inline constexpr char kMaxRestarts[] = "LAUNCHER_TEST_MAX_RESTARTS";

// "print_much" prints this many lines of this many bytes.
inline constexpr int kLines = 1000;
inline constexpr int kLineBytes = 1000;

// Plays this process's role and returns its exit code. Returns nullopt in the
// test itself, which has no role.
std::optional<int> PlayRole();

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LAUNCHER_ROLES_H_
