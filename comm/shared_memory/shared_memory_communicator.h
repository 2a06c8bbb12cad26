// A communicator of processes (or threads) of one host, which read each other's
// memory.
#ifndef COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_
#define COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct SharedMemoryOptions {
  // Communicator::default_timeout(), and how long all ranks may take to come.
  absl::Duration timeout = absl::Minutes(5);
  // Ranks with different names here are never taken to be on one host, whatever
  // the kernel says.
  std::string host;
  // The rank in the world of each rank, where the group is a part of it.
  std::vector<int> world_ranks = {};
};

// Returns one rank's end of a group that meets in `store`, which no other group
// uses and which is not needed afterwards. Blocks until all ranks have come.
// Errors:
//   FailedPrecondition  on all ranks alike: they are on several hosts, or in
//                       containers that hide their processes from each other
//   DeadlineExceeded    names a rank that has not come
//
// It takes CPU tensors. AllocateSymmetric() gives memory that peers read in
// place: an all-gather from it costs one copy, a reduce-scatter none. Work on
// other memory goes through 2 MiB per rank and group. AllocateCommon() works.
// Nothing runs in the background: data moves in the threads that start
// operations and wait for them. So Work::Wait() on memory of
// AllocateSymmetric() returns once the peers wait, too; WaitForResult() needs
// them only to have started. Sums go through the ranks in order. Ranks that
// wait for a rank notice its death within a tenth of a second. However a rank
// dies, no memory is left behind.
CreatedCommunicator CreateSharedMemoryCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const SharedMemoryOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_
