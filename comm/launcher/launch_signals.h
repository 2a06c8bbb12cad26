// Questions to a process that starts ranks, while it has none.
#ifndef COMM_LAUNCHER_LAUNCH_SIGNALS_H_
#define COMM_LAUNCHER_LAUNCH_SIGNALS_H_

namespace fsdp::comm {

// From now on SIGQUIT and SIGUSR1, by which LaunchRanks() asks the ranks what
// they are doing, do not end this process, unless it has handlers for them:
// whoever asks may do so before the ranks are there, and after they have ended.
void IgnoreQuestions();

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCH_SIGNALS_H_
