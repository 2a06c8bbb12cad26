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
// Thread-safe. The current CUDA device has to be the group's where it is made.
class NcclHandle {
 public:
  // Joins the group of `world_size` ranks that have the same `id`.
  static absl::StatusOr<std::unique_ptr<NcclHandle>> Connect(
      const ncclUniqueId& id, int rank, int world_size, absl::Time deadline);

  // Aborts what Close() has not ended.
  ~NcclHandle();

  // The group of the ranks that pass the same `color` >= 0.
  absl::StatusOr<std::unique_ptr<NcclHandle>> Split(int color, int key,
                                                    absl::Time deadline);

  // This rank's place in the group.
  absl::StatusOr<int> Rank() const;
  absl::StatusOr<int> Size() const;

  // Runs `call` and waits until NCCL has taken it in, which is not until the
  // device has done it. Aborted: Abort() was called.
  absl::Status Call(absl::string_view what, absl::Time deadline,
                    absl::FunctionRef<ncclResult_t(ncclComm_t)> call);

  // What NCCL has run into since.
  absl::Status Health();

  // Ends what runs on the device; every later call fails. Idempotent.
  void Abort();

  // Leaves the group in peace: what this rank has called is done, and its peers
  // may still be reading from here. Aborts where that takes too long.
  void Close(absl::Time deadline);

 private:
  explicit NcclHandle(ncclComm_t comm) : comm_(comm) {}

  // Until NCCL is no longer busy.
  absl::Status Settle(absl::string_view what, ncclResult_t result,
                      absl::Time deadline);

  mutable absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_);  // nullptr once aborted or closed
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_HANDLE_H_
