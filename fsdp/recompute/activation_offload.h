// Moves the arguments of checkpointed regions out of memory between forward and
// backward: to host memory or to an SSD, whatever the store is. Devices copy
// beside what they compute.
//
//   auto store = fsdp::offload::FileStore::Make(file_options);
//   auto offload = fsdp::ActivationOffload::Make(*std::move(store), {});
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
#include "fsdp/recompute/transfer_stats.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {

struct MovedTensor;
class PackedForm;
class TensorTransfers;

struct ActivationOffloadOptions {
  // Smaller tensors stay in memory.
  int64_t min_bytes = int64_t{64} << 10;
  // Of tensors that are being written, which keep their memory for so long, and
  // as much again for those that are read ahead; of tensors of a device, as
  // much memory of the host again. A tensor that is larger is written when no
  // other is, and never read ahead.
  int64_t window_bytes = int64_t{64} << 20;
  // While backward recomputes a region, the arguments of so many before it are
  // read.
  int regions_ahead = 1;
  // Of each wait for the store, and for the device.
  absl::Duration timeout = absl::Minutes(5);
  // The communicator's: for what the rank waits. Null: nobody is told.
  std::shared_ptr<comm::RankActivity> activity = nullptr;
};

struct ActivationOffloadStats : TensorTransferStats {
  // Tensors when backward needed them: still in memory; read ahead, or about to
  // be; neither.
  int64_t found = 0;
  int64_t prefetched = 0;
  int64_t missed = 0;
  // What the store has in use.
  int64_t stored_bytes = 0;
  int64_t peak_stored_bytes = 0;
};

class MovedArguments;

// Writes behind forward and reads ahead of backward, which goes through the
// tensors in the reverse order of forward's. Best one per rank. Thread-safe;
// calls wait for each other.
//
// A tensor that the store has no room for, or that cannot be written, stays in
// memory: nothing is lost, and the first failure to write is reported by a
// warning. Otherwise its memory is free once it is written, if nobody else
// holds the tensor; a call of any kind finds what is written.
//
// For tensors of a device with streams, calls belong to the stream that is
// current, and the copies to others beside it. The host waits for the store
// only, and for the device where the window is full of bytes that the store is
// to get, or that have come from there; never where the store is memory that
// the device copies. There the device's computing waits instead: for copies
// that are the window behind.
class ActivationOffload
    : public std::enable_shared_from_this<ActivationOffload> {
 public:
  // InvalidArgument for options that are negative, or without a timeout.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> Make(
      std::unique_ptr<offload::ParamStore> store,
      const ActivationOffloadOptions& options);
  // A device copies straight from and to the store's memory if that is locked
  // for it (LockedPages): the host waits for nothing then.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> Make(
      std::unique_ptr<offload::HostStore> store,
      const ActivationOffloadOptions& options);
  // In such memory: `capacity` bytes, which are locked for `device` now, and as
  // long as this lives. ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> MakeInHostMemory(
      int64_t capacity, c10::Device device,
      const ActivationOffloadOptions& options);
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;
  // Waits for what is under way.
  ~ActivationOffload();

  // Takes those of `tensors`, without grad, that are floating-point and have a
  // PackedForm, and leaves undefined ones: they belong to `whose` ("a
  // checkpointed region in unit blocks.3"). The others stay as they are. Null
  // when none is taken. A tensor that is there twice, or that another owner has
  // as well, is written once.
  std::unique_ptr<MovedArguments> MoveOut(
      const std::vector<at::Tensor*>& tensors, absl::string_view whose);

  ActivationOffloadStats stats();
  const offload::ParamStore& store() const { return store_; }

 private:
  friend class MovedArguments;
  // A tensor and how many have it.
  struct Entry;
  using Entries = std::vector<std::shared_ptr<Entry>>;
  // Has the mutex. What is dropped meanwhile is freed after it.
  class Turn;

  struct Place {
    std::unique_ptr<offload::PageAllocator> pages;  // null: of somebody else
    std::unique_ptr<offload::ParamStore> store;
    offload::HostStore* memory = nullptr;  // `store`, if it is one
  };

  ActivationOffload(Place place, const ActivationOffloadOptions& options);
  static absl::StatusOr<std::shared_ptr<ActivationOffload>> MakeAt(
      Place place, const ActivationOffloadOptions& options);

  absl::StatusOr<std::vector<at::Tensor>> MoveIn(MovedArguments& moved);
  void Erase(const MovedArguments& moved);

  // The entry of `tensor`; null where it has to stay.
  std::shared_ptr<Entry> Take(const at::Tensor& tensor, absl::string_view whose)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Entry> FindSame(const at::Tensor& tensor,
                                  const PackedForm& form)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Those whose backward is likely to be next, the nearest first.
  using Next = std::vector<const MovedArguments*>;
  static bool Has(const Next& next, const std::shared_ptr<MovedTensor>& tensor);
  Next NextAfter(const MovedArguments& moved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadAhead(const Next& next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For `bytes` to read, without those of `next`.
  bool MakeRoomToRead(int64_t bytes, const Next& next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountUses(const Entries& entries) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WarnOfFirstFailure() ABSL_LOCKS_EXCLUDED(mutex_);

  const ActivationOffloadOptions options_;
  const std::unique_ptr<offload::PageAllocator> pages_;
  absl::Mutex mutex_;
  const std::unique_ptr<TensorTransfers> transfers_ ABSL_PT_GUARDED_BY(mutex_);
  const offload::ParamStore& store_;
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, const MovedArguments*> moved_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const c10::StorageImpl*, Entries> by_source_
      ABSL_GUARDED_BY(mutex_);
  bool warned_ ABSL_GUARDED_BY(mutex_) = false;
  ActivationOffloadStats stats_ ABSL_GUARDED_BY(mutex_);
};

// What MoveOut() has taken. The store has it until this is destroyed, by any
// thread.
class MovedArguments {
 public:
  MovedArguments(const MovedArguments&) = delete;
  MovedArguments& operator=(const MovedArguments&) = delete;
  ~MovedArguments();

  // One for each of the tensors of MoveOut(): with the same bits, or undefined
  // where it was not taken. Other threads and owners may get the same tensor,
  // so it may not be modified. Errors of the store say what was to be read, and
  // change nothing: a later call may do better.
  absl::StatusOr<std::vector<at::Tensor>> MoveIn();

 private:
  friend class ActivationOffload;

  MovedArguments(std::shared_ptr<ActivationOffload> offload,
                 absl::string_view whose)
      : offload_(std::move(offload)), whose_(whose) {}

  const std::shared_ptr<ActivationOffload> offload_;
  const std::string whose_;
  // These belong to `offload_`.
  int64_t id_ = 0;                      // in the order of forward
  ActivationOffload::Entries entries_;  // null: not taken
  int64_t times_in_ = 0;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_ACTIVATION_OFFLOAD_H_
