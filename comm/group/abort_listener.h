// Tells a rank that another one has aborted their group.
#ifndef COMM_GROUP_ABORT_LISTENER_H_
#define COMM_GROUP_ABORT_LISTENER_H_

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// Hears of an abort whatever this rank does, by a broadcast that rank 0
// withholds: nothing moves, and it ends when a rank aborts the group. Rank 0
// itself hears nothing. Between Begin() and End() the
// group is used for nothing else but Abort(). Used by one thread at a time.
class AbortListener {
 public:
  // `on_failure` gets the broadcast's error, in a thread of the listener.
  AbortListener(Communicator* group,
                std::function<void(const absl::Status&)> on_failure);

  // The group has been aborted, or End() called.
  ~AbortListener();

  // ResourceExhausted: no thread can be started.
  absl::Status Begin();

  // Collective: rank 0 no longer withholds it. The broadcast's error.
  absl::Status End();

 private:
  void Join();

  Communicator* const group_;
  const std::function<void(const absl::Status&)> on_failure_;
  absl::Status result_;  // of thread_
  std::thread thread_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_ABORT_LISTENER_H_
