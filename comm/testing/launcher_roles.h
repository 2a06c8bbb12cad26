// What the processes that launcher_test starts do.
#ifndef COMM_TESTING_LAUNCHER_ROLES_H_
#define COMM_TESTING_LAUNCHER_ROLES_H_

#include <optional>

namespace fsdp::comm {

// Environment variables: the role of a process, the role of the ranks of a
// process that is a launcher itself, the path of a FIFO, a signal that a
// launcher ignores from its start, 0 for none, how often it restarts its
// ranks, by default never: after a pause of an hour then; and, where they are
// set, that SIGUSR1 ends the job, and that "train" fails to stop.
inline constexpr char kRole[] = "LAUNCHER_TEST_ROLE";
inline constexpr char kNestedRole[] = "LAUNCHER_TEST_NESTED_ROLE";
inline constexpr char kFifo[] = "LAUNCHER_TEST_FIFO";
inline constexpr char kIgnoredSignal[] = "LAUNCHER_TEST_IGNORED_SIGNAL";
inline constexpr char kEndsByUsr1[] = "LAUNCHER_TEST_ENDS_BY_USR1";
inline constexpr char kFailsToStop[] = "LAUNCHER_TEST_FAILS_TO_STOP";
inline constexpr char kMaxRestarts[] = "LAUNCHER_TEST_MAX_RESTARTS";

// "print_much" prints as many lines of so many bytes.
inline constexpr int kLines = 1000;
inline constexpr int kLineBytes = 1000;

// Plays this process's role and returns the exit code; nullopt where it has
// none, since it is the test itself.
std::optional<int> PlayRole();

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LAUNCHER_ROLES_H_
