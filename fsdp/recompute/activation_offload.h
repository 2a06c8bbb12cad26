// Moves the arguments of checkpointed regions out of memory between forward and
// backward, to a store in host memory or on an SSD. Devices copy while they
// compute.
//
//   auto offload =
//       fsdp::ActivationOffload::MakeInFile("/scratch", bytes, {});
//   fsdp::CheckpointOptions options;
//   options.offload = *offload;
//   x = fsdp::CheckpointWith(options, fn, x);
#ifndef FSDP_RECOMPUTE_ACTIVATION_OFFLOAD_H_
#define FSDP_RECOMPUTE_ACTIVATION_OFFLOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/rank_activity.h"
#include "offload/param_store.h"

namespace fsdp {

namespace offload {
class PageAllocator;
}  // namespace offload

struct MovedTensor;
class PackedForm;
class TensorTransfers;

// Options of one rank's ActivationOffload.
struct ActivationOffloadOptions {
  // Smaller tensors stay in memory.
  int64_t min_bytes = int64_t{64} << 10;
  // Limits bytes that are being written, which keep their memory so long, and
  // as many that are read ahead; tensors of a device take as much memory of the
  // host again. A larger tensor is written when no other is, and never read
  // ahead.
  int64_t window_bytes = int64_t{64} << 20;
  // Earlier regions whose arguments are read while backward recomputes one.
  int regions_ahead = 1;
  // Limits each wait for the store and each wait for the device.
  absl::Duration timeout = absl::Minutes(5);
  // The communicator's, to be told what the rank waits for; may be null.
  std::shared_ptr<comm::RankActivity> activity = nullptr;
};

// Counts of what goes to a store and comes back.
struct TensorTransferStats {
  int64_t tensors_out = 0;    // written well
  int64_t bytes_out = 0;      // of these tensors
  int64_t bytes_in = 0;       // that were read
  int64_t full = 0;           // writes that the store had no room for
  int64_t failed = 0;         // writes and erasures that failed otherwise
  double waited_seconds = 0;  // of the host, for the store
};

// Counts what a rank's ActivationOffload has done since it was made.
struct ActivationOffloadStats : TensorTransferStats {
  // Tensors that backward needed: `found` in memory, `prefetched` (read ahead,
  // maybe not yet completely), or `missed`.
  int64_t found = 0;
  int64_t prefetched = 0;
  int64_t missed = 0;
  // Bytes of the store that are in use.
  int64_t stored_bytes = 0;  // at present
  int64_t peak_stored_bytes = 0;
};

class MovedArguments;

// Writes behind forward and reads ahead of backward, which needs the tensors in
// the reverse order. Make one for each rank. Thread-safe; calls wait for each
// other.
//
// A tensor that the store has no room for, or that cannot be written, stays in
// memory: nothing is lost, and one warning reports the first failed write.
// Others' memory is free once they are written, if nobody else holds them; a
// call of any kind finds out.
//
// For tensors of a device with streams, calls are ordered by the current
// stream, and copies run beside it. The host waits for the store, and for the
// device only while the window is full of bytes on their way. If the device
// copies the store's memory itself, the host never waits; the device's
// computing then waits for copies that are a window behind.
class ActivationOffload
    : public std::enable_shared_from_this<ActivationOffload> {
 public:
  // A device copies straight from and to a HostStore whose memory is locked for
  // it (LockedPages), and the host waits for nothing. InvalidArgument: an
  // option is negative, or the timeout is not positive.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> Make(
      std::unique_ptr<offload::ParamStore> store,
      const ActivationOffloadOptions& options);
  // The same with a new file of `capacity` bytes in `directory`, which ends
  // with the process. NotFound, PermissionDenied, ResourceExhausted: the file
  // cannot be made.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> MakeInFile(
      const std::string& directory, int64_t capacity,
      const ActivationOffloadOptions& options);
  // The same with a new store of `capacity` bytes, locked for `device` as long
  // as the result lives. ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> MakeInHostMemory(
      int64_t capacity, c10::Device device,
      const ActivationOffloadOptions& options);
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;
  // Waits for transfers that are under way.
  ~ActivationOffload();

  // Takes floating-point tensors that have a PackedForm, leaving undefined
  // ones; the others stay. Null if it takes none. `tensors` are without grad.
  // `whose` names them in errors ("a checkpointed region in unit blocks.3"). A
  // tensor that is there twice, or that another MovedArguments has too, is
  // written once.
  std::unique_ptr<MovedArguments> MoveOut(
      const std::vector<at::Tensor*>& tensors, absl::string_view whose);

  ActivationOffloadStats stats();  // up to now
  // The store that Make() got or made.
  const offload::ParamStore& store() const { return store_; }

 private:
  friend class MovedArguments;
  // Holds the mutex, and frees what is dropped meanwhile after it.
  class Turn;

  // `pages` is null if they are somebody else's.
  ActivationOffload(std::unique_ptr<offload::PageAllocator> pages,
                    std::unique_ptr<offload::ParamStore> store,
                    const ActivationOffloadOptions& options);
  // `pages` stays the caller's where options are refused: it outlives `store`.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> MakeAt(
      std::unique_ptr<offload::PageAllocator>&& pages,
      std::unique_ptr<offload::ParamStore> store,
      const ActivationOffloadOptions& options);

  absl::StatusOr<std::vector<at::Tensor>> MoveIn(MovedArguments& moved);
  void Erase(const MovedArguments& moved);

  // Returns null if `tensor` has to stay.
  std::shared_ptr<MovedTensor> Take(const at::Tensor& tensor,
                                    absl::string_view whose)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The arguments that backward is likely to need next, the nearest first.
  using Next = std::vector<const MovedArguments*>;
  static bool Has(const Next& next, const std::shared_ptr<MovedTensor>& tensor);
  Next NextAfter(const MovedArguments& moved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadAhead(const Next& next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes room to read `bytes` by dropping tensors that `next` does not have.
  bool MakeRoomToRead(int64_t bytes, const Next& next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WarnOfFirstFailure() ABSL_LOCKS_EXCLUDED(mutex_);

  const ActivationOffloadOptions options_;
  const std::unique_ptr<offload::PageAllocator> pages_;
  absl::Mutex mutex_;
  const std::unique_ptr<TensorTransfers> transfers_ ABSL_PT_GUARDED_BY(mutex_);
  const offload::ParamStore& store_;
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, const MovedArguments*> moved_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const c10::StorageImpl*,
                      std::vector<std::shared_ptr<MovedTensor>>>
      by_source_ ABSL_GUARDED_BY(mutex_);
  bool warned_ ABSL_GUARDED_BY(mutex_) = false;
  ActivationOffloadStats stats_ ABSL_GUARDED_BY(mutex_);
};

// Holds what MoveOut() has taken. The store keeps it until this is destroyed,
// which any thread may do.
class MovedArguments {
 public:
  MovedArguments(const MovedArguments&) = delete;
  MovedArguments& operator=(const MovedArguments&) = delete;
  ~MovedArguments();

  // Returns a tensor for each of MoveOut()'s, with the same bits, or undefined
  // if it was not taken. Others may get the same tensor, so do not modify it.
  // The store's errors say what was to be read and change nothing: a later call
  // may succeed.
  absl::StatusOr<std::vector<at::Tensor>> MoveIn();

 private:
  friend class ActivationOffload;

  MovedArguments(std::shared_ptr<ActivationOffload> offload,
                 absl::string_view whose)
      : offload_(std::move(offload)), whose_(whose) {}

  const std::shared_ptr<ActivationOffload> offload_;
  const std::string whose_;
  // The rest belongs to `offload_`.
  int64_t id_ = 0;  // in the order of forward
  std::vector<std::shared_ptr<MovedTensor>> tensors_;  // null: not taken
  int64_t times_in_ = 0;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_ACTIVATION_OFFLOAD_H_
