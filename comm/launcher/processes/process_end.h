// The end of a process.
#ifndef COMM_LAUNCHER_PROCESSES_PROCESS_END_H_
#define COMM_LAUNCHER_PROCESSES_PROCESS_END_H_

namespace fsdp::comm {

struct ProcessEnd {
  int exit_code = 0;
  int signal = 0;  // that killed it; 0: it exited by itself
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_PROCESSES_PROCESS_END_H_
