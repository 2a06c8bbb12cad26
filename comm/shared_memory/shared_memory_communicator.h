// Ranks that are processes (or threads) of one host and read each other's
// memory.
#ifndef COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_
#define COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

struct SharedMemoryOptions {
  // Communicator::default_timeout; also for all ranks to appear.
  absl::Duration timeout = absl::Minutes(5);
  // Ranks with different names are never taken to be on one host, whatever the
  // kernel says.
  std::string host;
  // Of each rank, where the group is a part of another one.
  std::vector<int> world_ranks = {};
};

// One rank of a group that meets in `store`, which no other group uses; the
// store is not needed afterwards. CPU tensors. Blocks until all ranks have
// come.
//
//   FailedPrecondition  on all ranks alike: they are on several hosts, or in
//                       containers that hide their processes from each other
//   DeadlineExceeded    names a rank that has not come
//
// AllocateSymmetric() gives memory that peers read in place: an all-gather from
// it costs one copy, a reduce-scatter none. Work on other memory goes through
// 2 MiB per rank and group. AllocateCommon() works. Nothing is done in the
// background: data moves in the threads that start operations and wait for
// them. Work::Wait() on memory of AllocateSymmetric() therefore returns when
// the peers wait for theirs, too; WaitForResult() needs them only to have
// started. Sums go through the ranks in order. A rank that dies is noticed by
// those who wait for it within a tenth of a second, and no way of dying leaves
// memory behind.
absl::StatusOr<std::unique_ptr<Communicator>> CreateSharedMemoryCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const SharedMemoryOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_SHARED_MEMORY_SHARED_MEMORY_COMMUNICATOR_H_
