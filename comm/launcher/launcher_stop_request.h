// Ctrl-C as a wish that a training loop reads between two steps.
#ifndef COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
#define COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_

#include <signal.h>

namespace fsdp::comm {

// While it exists, the first SIGINT or SIGTERM is noted instead of ending the
// process; the second one ends it. A signal that the process ignores stays
// ignored. At most one at a time in a process.
//
// Ranks learn of it one by one: they have to agree on the step after which they
// stop, as by an all-reduce of what each has seen.
class StopRequest {
 public:
  StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;
  ~StopRequest();  // restores what was

  // The signal that has come; 0: none. Thread-safe.
  int signal() const;
  bool requested() const { return signal() != 0; }

 private:
  struct sigaction previous_int_ = {};
  struct sigaction previous_term_ = {};
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
