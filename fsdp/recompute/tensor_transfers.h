// Tensors on their way to a store and back.
#ifndef FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_
#define FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/recompute/device_stage.h"
#include "fsdp/recompute/packed_form.h"
#include "fsdp/recompute/transfer_stats.h"
#include "offload/host_store.h"
#include "offload/param_store.h"

namespace fsdp {

// A tensor that has a region of a store. All but `form`, packed.defined(),
// `in_store` and the functions belongs to TensorTransfers.
struct MovedTensor {
  MovedTensor(PackedForm form, std::string region)
      : form(std::move(form)), region(std::move(region)) {}

  bool IsBeingWritten() const { return doing == Doing::kWriting; }
  // Whether Drop() frees its memory.
  bool CanDrop() const;
  // The last copy of its device.
  const SharedEvent& LastCopy() const { return up != nullptr ? up : down; }

  const PackedForm form;
  const std::string region;
  // Its bytes while they are in the memory of its device: until they are
  // written, for ever if that fails, and from the start of a read until Drop().
  at::Tensor packed;
  // Where the store finds them, and leaves them. For tensors of the CPU,
  // `packed`. For others memory of the host that `stage` copies from and to: of
  // the region itself (`direct`), or until the store has them, for ever if it
  // fails, and again from the start of a read until they are on the device.
  at::Tensor host;
  DeviceStage* stage = nullptr;
  bool direct = false;
  SharedEvent down;  // null: none, or it is known to be over
  SharedEvent up;    // null: `packed` is what was written
  // Where `packed` was allocated, and from when on it may be written.
  std::optional<c10::Stream> owner;
  SharedEvent ready;
  bool unordered = false;  // `owner` does not wait for the last copy

  enum class Doing { kNothing, kWriting, kReading };
  Doing doing = Doing::kNothing;
  // With the store. None yet while bytes that are to be written come down.
  std::unique_ptr<offload::Transfer> transfer;  // goes before its memory
  bool in_store = false;
  bool ahead = false;      // what is read, nobody has asked for yet
  bool wanted = false;     // stays in memory when it is written
  bool abandoned = false;  // nobody will ask for it
};
using MovedTensorPtr = std::shared_ptr<MovedTensor>;

// Tensors of devices with streams are copied beside what these compute. Their
// bytes rest for the store in page-locked memory, or go straight into its own.
// The device's memory is free when the copy is over, which later calls find; or
// where the window is full, for what computes after it.
//
// Used by one thread at a time. Calls belong to the current stream.
class TensorTransfers {
 public:
  // At most `window_bytes` are being written, or one tensor. `memory` is the
  // store where that lies in memory of the host that devices may copy, if it is
  // locked for them; or null. `timeout`: of each wait. `activity` is told of
  // waits and may be null.
  TensorTransfers(std::unique_ptr<offload::ParamStore> store,
                  offload::HostStore* memory, int64_t window_bytes,
                  absl::Duration timeout,
                  std::shared_ptr<comm::RankActivity> activity);
  TensorTransfers(const TensorTransfers&) = delete;
  TensorTransfers& operator=(const TensorTransfers&) = delete;
  // Waits for what is under way.
  ~TensorTransfers();

  // Writes `tensor`, whose form is `form`, to a new region; waits first until
  // there is room for it in the window: the stream does for bytes that go
  // straight into a store's memory, the host for others. Null when it has to
  // stay where it is.
  MovedTensorPtr Write(const at::Tensor& tensor, const PackedForm& form,
                       std::string region);

  // Starts to read what is not in memory. `ahead`: before anybody needs it.
  absl::Status StartRead(const MovedTensorPtr& moved, bool ahead);
  // The tensor itself, read if need be, and once more if it could not be read
  // ahead. After DeadlineExceeded a later call waits on.
  absl::StatusOr<at::Tensor> Read(const MovedTensorPtr& moved);
  // What is being written stays in memory afterwards, until Drop().
  void Keep(const MovedTensorPtr& moved);
  // Frees the memory of what the store has, unless a transfer uses it.
  void Drop(const MovedTensorPtr& moved);

  // What is being read, was read or was kept, and has not been dropped.
  const std::vector<MovedTensorPtr>& reading() const { return reading_; }
  bool HasRoomToRead(int64_t bytes) const {
    return reading_bytes_ + bytes <= window_bytes_;
  }

  // Erases the region, at once or when the transfer of it is over.
  void Abandon(const MovedTensorPtr& moved);
  // Finds what is over.
  void Poll();

  const offload::ParamStore& store() const { return *store_; }
  const TensorTransferStats& stats() const { return stats_; }
  // Of the first write that failed; given once.
  absl::Status TakeFailure() {
    return std::exchange(failure_, absl::OkStatus());
  }
  // Memory that was dropped. Freeing it may run anybody's code.
  std::vector<at::Tensor> TakeDropped();

 private:
  using Doing = MovedTensor::Doing;

  bool MakeRoomToWrite(const MovedTensor& moved);
  bool Create(MovedTensor& moved);
  absl::Status StartWrite(MovedTensor& moved, const at::Tensor& tensor);
  absl::Status StartDown(MovedTensor& moved);
  absl::Status TakeHostMemory(MovedTensor& moved);
  absl::Status GiveToStore(MovedTensor& moved, absl::Time deadline);
  absl::Status StartReadOnCpu(MovedTensor& moved);
  absl::Status StartReadToDevice(MovedTensor& moved, bool ahead);
  absl::Status ReadFromStore(MovedTensor& moved);
  absl::Status StartUp(MovedTensor& moved);

  // Waits for the device and the store; DeadlineExceeded while something is
  // under way.
  absl::Status Settle(const MovedTensorPtr& moved, absl::Time deadline);
  absl::Status FinishDown(MovedTensor& moved, absl::Time deadline);
  absl::Status FinishWrite(MovedTensor& moved, absl::Time deadline);
  absl::Status FinishRead(const MovedTensorPtr& moved);
  // Ends the writing of what goes straight into the store's memory, for what
  // computes from now on.
  void EndForStream(const MovedTensorPtr& moved);
  void WriteIsOver(const MovedTensorPtr& moved, const absl::Status& result);
  absl::Status ReadIsOver(const MovedTensorPtr& moved, absl::Status result);

  void LeaveWriting(const MovedTensorPtr& moved);
  void JoinReading(const MovedTensorPtr& moved);
  void LeaveReading(const MovedTensorPtr& moved);
  void Forget(const MovedTensorPtr& moved);
  void DropPacked(MovedTensor& moved);
  void DropHost(MovedTensor& moved);
  void Erase(MovedTensor& moved);
  void Failed(const absl::Status& status);
  DeviceStage& StageOf(c10::Device device);

  const std::unique_ptr<offload::ParamStore> store_;
  offload::HostStore* const memory_;
  const int64_t window_bytes_;
  const absl::Duration timeout_;
  const std::shared_ptr<comm::RankActivity> activity_;
  std::vector<std::unique_ptr<DeviceStage>> stages_;  // one for each device
  DeviceStage* direct_stage_ = nullptr;  // whose copies use `memory_`
  // They may also use regions that were erased since the last wait for them.
  bool direct_erased_ = false;
  std::vector<MovedTensorPtr> writing_;  // in the order of their start
  int64_t writing_bytes_ = 0;
  bool writes_hang_ = false;  // none has ended since a wait was in vain
  std::vector<MovedTensorPtr> reading_;
  int64_t reading_bytes_ = 0;
  std::vector<at::Tensor> dropped_;
  absl::Status failure_;
  TensorTransferStats stats_;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_
