// An NCCL communicator that any thread may abort.
#ifndef COMM_NCCL_NCCL_HANDLE_H_
#define COMM_NCCL_NCCL_HANDLE_H_

#include <c10/core/ScalarType.h>
#include <nccl.h>

#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The communicator is a blocking one. (A non-blocking one starts a thread for
// each operation, whose end the caller has to poll for, and cannot be used any
// more once NCCL has refused a call.) Calls may wait for peers: all of them
// while ranks connect, which the first operation of a kind does, and operations
// when the device's queue is full. Abort() ends these waits, too. Inside
// ncclGroupStart(), ncclCommAbort() sets the flags that NCCL looks at on the
// host and on the device, and leaves the freeing to ncclGroupEnd(). Abort()
// calls that once the call in progress has returned.
//
// Thread-safe. The group's CUDA device has to be the current one in Connect()
// and Enqueue().
class NcclHandle {
 public:
  // Joins the group of `world_size` ranks that have the same `id`.
  static absl::StatusOr<std::unique_ptr<NcclHandle>> Connect(
      const ncclUniqueId& id, int rank, int world_size, absl::Time deadline);

  // Calls Abort().
  ~NcclHandle();

  // Returns the group of the ranks that pass the same `color` >= 0, ordered by
  // `key`. After an error this group has been aborted, too.
  absl::StatusOr<std::unique_ptr<NcclHandle>> Split(int color, int key,
                                                    absl::Time deadline);

  // Makes `call`, which gives the device an operation, in this thread. It has
  // no deadline: whoever has one calls Abort(). Enqueue() and Call() wait until
  // earlier calls have returned. Aborted: Abort() was called.
  absl::Status Enqueue(absl::string_view what,
                       absl::FunctionRef<ncclResult_t(ncclComm_t)> call);

  // Makes `call` in a thread of its own. If it is not over at `deadline`, the
  // group is aborted; a call that does not return even then is left behind,
  // with what it holds. After other errors than Aborted and DeadlineExceeded
  // the group can still be used.
  absl::Status Call(absl::string_view what, absl::Time deadline,
                    std::function<ncclResult_t(ncclComm_t)> call);

  // Returns the error that NCCL has met in an operation on the device.
  absl::Status Health();

  // Ends all operations on the device; every later call fails. Only the first
  // call has an effect. Waits a few seconds for peers on this host, which have
  // to do the same, and for CUDA graphs with operations of this group, which
  // have to be destroyed.
  void Abort();

  // Leaves the group when all calls of this rank are done, without harm to
  // peers that still read its memory. Aborts if that takes too long.
  void Close(absl::Time deadline);

 private:
  class State;
  enum class Ending { kAbort, kDestroy };

  explicit NcclHandle(int device);

  // Makes `call`, which may make the communicator itself.
  absl::Status Run(absl::string_view what, absl::Time deadline,
                   std::function<ncclResult_t(State&)> call);
  void End(Ending ending, absl::Time deadline);

  const int device_;
  const std::shared_ptr<State> state_;  // shared with calls left behind
  absl::Mutex ending_;                  // held while a thread ends the group
};

// Returns OK for ncclSuccess, else "`what`: NCCL's text; `detail`: what to do".
// `detail` is the text of ncclGetLastError() and may be empty. Codes:
//   a peer or the network failed           -> Unavailable
//   a CUDA call failed, NCCL is broken     -> Internal
//   the call or its arguments are wrong    -> InvalidArgument
//   still in progress                      -> DeadlineExceeded
// Needs no GPU. Thread-safe.
absl::Status NcclToStatus(ncclResult_t result, absl::string_view what,
                          absl::string_view detail = "");

// These return NCCL's names of a dtype and a reduction that communicators take.
ncclDataType_t NcclDtype(at::ScalarType dtype);
ncclRedOp_t NcclReduction(ReduceOp op);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_HANDLE_H_
