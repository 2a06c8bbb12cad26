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
#include "comm/call.h"

namespace fsdp::comm {

// A blocking one: a non-blocking one starts a thread for each operation, whose
// end the caller has to poll for, and is of no more use when NCCL has refused a
// call. Its calls can wait for peers: all of them while ranks connect, which
// the first operation of a kind does, and operations where the device's queue
// is full. An abort ends these waits, too. Inside ncclGroupStart(),
// ncclCommAbort() sets the flags that NCCL looks at on the host and on the
// device, and leaves the freeing to ncclGroupEnd(); Abort() calls that once the
// call in progress, if there is one, has returned.
//
// Thread-safe. The group's CUDA device has to be the current one in Connect()
// and Enqueue().
class NcclHandle {
 public:
  // Joins the group of `world_size` ranks that have the same `id`.
  static absl::StatusOr<std::unique_ptr<NcclHandle>> Connect(
      const ncclUniqueId& id, int rank, int world_size, absl::Time deadline);

  // Aborts what Close() has not ended.
  ~NcclHandle();

  // The group of the ranks that pass the same `color` >= 0. After an error this
  // one has been aborted, too.
  absl::StatusOr<std::unique_ptr<NcclHandle>> Split(int color, int key,
                                                    absl::Time deadline);

  // Gives the device an operation by `call`, in this thread. Has no deadline of
  // its own: whoever has one calls Abort(). One call at a time, here and below.
  // Aborted: Abort() was called.
  absl::Status Enqueue(absl::string_view what,
                       absl::FunctionRef<ncclResult_t(ncclComm_t)> call);

  // Runs `call` in a thread of its own. Where it is not over at `deadline` this
  // has been aborted, and `call`, with what it holds, is left behind if it has
  // not returned even then. Another error than Aborted and DeadlineExceeded
  // does no harm to what is called later.
  absl::Status Call(absl::string_view what, absl::Time deadline,
                    std::function<ncclResult_t(ncclComm_t)> call);

  // What NCCL has run into since.
  absl::Status Health();

  // Ends what runs on the device; every later call fails. Idempotent. Waits a
  // few seconds for peers on this host, which have to do the same, and for CUDA
  // graphs with operations of this group, which go before.
  void Abort();

  // Leaves the group in peace: what this rank has called is done, and its peers
  // may still be reading from here. Aborts where that takes too long.
  void Close(absl::Time deadline);

 private:
  class State;
  enum class Ending { kAbort, kDestroy };

  explicit NcclHandle(int device);

  // Runs `call`, which may be what makes the communicator.
  absl::Status Run(absl::string_view what, absl::Time deadline,
                   std::function<ncclResult_t(State&)> call);
  void End(Ending ending, absl::Time deadline);

  const int device_;
  const std::shared_ptr<State> state_;  // also of calls that are left behind
  absl::Mutex ending_;  // held by who ends it, so that others wait
};

// NCCL's error codes as absl::Status, and its names for dtypes and reductions.

// OK for ncclSuccess; otherwise "`what`: NCCL's text; `detail`: what to do".
// `detail` is what ncclGetLastError() says and may be empty. Codes:
//   a peer or the network failed           -> Unavailable
//   a CUDA call failed, NCCL is broken     -> Internal
//   the call or its arguments are wrong    -> InvalidArgument
//   still in progress                      -> DeadlineExceeded
// Needs no GPU. Thread-safe.
absl::Status NcclToStatus(ncclResult_t result, absl::string_view what,
                          absl::string_view detail = "");

// Of a dtype and a reduction that communicators take.
ncclDataType_t NcclDtype(at::ScalarType dtype);
ncclRedOp_t NcclReduction(ReduceOp op);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_HANDLE_H_
