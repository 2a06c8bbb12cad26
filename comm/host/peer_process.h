// Tells whether another process of this host still runs.
#ifndef COMM_HOST_PEER_PROCESS_H_
#define COMM_HOST_PEER_PROCESS_H_

#include <sys/types.h>

#include <string>

namespace fsdp::comm {

// Watches one process from its construction on. A later process with the same
// number is not mistaken for it. Thread-compatible.
class PeerProcess {
 public:
  explicit PeerProcess(pid_t pid);
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;
  ~PeerProcess();

  pid_t pid() const { return pid_; }

  // True once it has ended, even if its parent has not waited for it yet.
  bool HasEnded() const;

  // Returns "process 4711 has ended", "... is stopped" or "... runs".
  std::string Describe() const;

 private:
  const pid_t pid_;
  const bool is_self_;
  const int descriptor_;       // -1: this process, or there is no pidfd_open(2)
  const std::string started_;  // start time, as the kernel says
};

}  // namespace fsdp::comm

#endif  // COMM_HOST_PEER_PROCESS_H_
