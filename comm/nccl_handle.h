// A non-blocking NCCL communicator that any thread may abort.
#ifndef COMM_NCCL_HANDLE_H_
#define COMM_NCCL_HANDLE_H_

#include <nccl.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace fsdp::comm {

// No call of this class waits longer than its deadline, whatever peers do.
// Thread-safe. The group's CUDA device has to be the current one in Connect(),
// Split() and Call(): NCCL leaves the current one set up.
class NcclHandle {
 public:
  // Joins the group of `world_size` ranks that have the same `id`.
  static absl::StatusOr<std::unique_ptr<NcclHandle>> Connect(
      const ncclUniqueId& id, int rank, int world_size, absl::Time deadline);

  // Aborts what Close() has not ended.
  ~NcclHandle();

  // The group of the ranks that pass the same `color` >= 0. After an error this
  // one is of no use any more, either.
  absl::StatusOr<std::unique_ptr<NcclHandle>> Split(int color, int key,
                                                    absl::Time deadline);

  // This rank's place in the group.
  absl::StatusOr<int> Rank() const;
  absl::StatusOr<int> Size() const;

  // Runs `call` and waits until NCCL has taken it in, which is not until the
  // device has done it. One at a time. What `call` has given to NCCL to write
  // to is written until this is over, or after an error until Abort() is.
  // Aborted: Abort() was called.
  absl::Status Call(absl::string_view what, absl::Time deadline,
                    absl::FunctionRef<ncclResult_t(ncclComm_t)> call);

  // What NCCL has run into since.
  absl::Status Health();

  // Ends what runs on the device; every later call fails. Idempotent. Waits a
  // few seconds for peers on this host, which have to do the same.
  void Abort();

  // Leaves the group in peace: what this rank has called is done, and its peers
  // may still be reading from here. Aborts where that takes too long.
  void Close(absl::Time deadline);

 private:
  NcclHandle(ncclComm_t comm, int device) : device_(device), comm_(comm) {}

  // Until NCCL is no longer busy.
  absl::Status Settle(absl::string_view what, ncclResult_t result,
                      absl::Time deadline);
  // By ncclCommAbort() or ncclCommDestroy().
  void End(ncclResult_t (*end)(ncclComm_t), absl::Time deadline);

  const int device_;
  mutable absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_);  // nullptr once aborted or closed
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
  ncclComm_t part_ = nullptr;  // what Split() makes; written by NCCL
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_HANDLE_H_
