// Moving bytes by calls that may move fewer.
#ifndef CHECKPOINT_FILES_MOVE_ALL_H_
#define CHECKPOINT_FILES_MOVE_ALL_H_

#include <sys/types.h>

#include <cerrno>
#include <cstdint>

namespace fsdp::checkpoint {

// Moves all `bytes` by `move(done)`, which is pread(2) or pwrite(2) of the
// rest; returns how many it has moved and leaves an errno if those are not all:
// 0 where a call has moved nothing.
template <typename Move>
int64_t MoveAll(int64_t bytes, Move move) {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t count = move(done);
    if (count > 0) {
      done += count;
    } else if (count == 0) {
      errno = 0;
      break;
    } else if (errno != EINTR) {
      break;
    }
  }
  return done;
}

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_MOVE_ALL_H_
