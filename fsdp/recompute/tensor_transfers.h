// Moves tensors to a store and back, those of a device by staging memory on the
// host.
#ifndef FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_
#define FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "comm/rank_activity.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/packed_form.h"
#include "offload/host_store.h"
#include "offload/param_store.h"

namespace fsdp {

class DeviceStage;

// A tensor that has a region of a store. Others than TensorTransfers may read
// `form`, packed.defined() and `in_store`, and call the functions.
struct MovedTensor {
  MovedTensor(PackedForm form, std::string region)
      : form(std::move(form)), region(std::move(region)) {}

  bool IsBeingWritten() const { return doing == Doing::kWriting; }
  // Returns whether Drop() frees its memory.
  bool CanDrop() const;
  // Returns the last copy by its device.
  const SharedEvent& LastCopy() const { return up != nullptr ? up : down; }

  const PackedForm form;
  const std::string region;
  // Its bytes in the memory of its device: until they are written, for ever if
  // that fails, and from the start of a read until Drop().
  at::Tensor packed;
  // The memory that the store reads and writes: `packed` for a CPU tensor, else
  // memory of the host that `stage` copies from and to. That is the region
  // itself (`direct`), or is there until the store has the bytes, for ever if
  // that fails, and from the start of a read until they are on the device.
  at::Tensor host;
  DeviceStage* stage = nullptr;
  bool direct = false;
  SharedEvent down;  // null: there is none, or it is known to be over
  SharedEvent up;    // null: `packed` is what was written
  // `owner` is the stream that `packed` was allocated for; from `ready` on it
  // may be written.
  std::optional<c10::Stream> owner;
  SharedEvent ready;
  bool unordered = false;  // `owner` does not wait for the last copy

  enum class Doing { kNothing, kWriting, kReading };
  Doing doing = Doing::kNothing;
  // The store's transfer; null while bytes to write are still copied to the
  // host.
  std::unique_ptr<offload::Transfer> transfer;  // goes before its memory
  bool in_store = false;
  bool ahead = false;      // it is read before anybody has asked for it
  bool wanted = false;     // it stays in memory when it is written
  bool abandoned = false;  // nobody will ask for it

  // These are its user's. It is a copy of the elements at `address` of the
  // storage `source`, as of `version`. The weak reference keeps the storage's
  // own address from being reused.
  c10::weak_intrusive_ptr<c10::StorageImpl> source{
      c10::intrusive_ptr<c10::StorageImpl>()};
  const void* address = nullptr;
  int64_t version = 0;
  int64_t owners = 1;
};
using MovedTensorPtr = std::shared_ptr<MovedTensor>;

// Moves tensors between memory and a store. Devices with streams copy while
// they compute, through page-locked memory of the host or straight into the
// store's own. The device's memory is free when the copy is over, which later
// calls find out, or where the window is full, for what computes after the
// copy.
//
// Used by one thread at a time. Calls are ordered by the current stream.
class TensorTransfers {
 public:
  // At most `window_bytes`, or one tensor, are being written at a time.
  // `timeout` limits each wait. `activity` is told of waits and may be null.
  TensorTransfers(std::unique_ptr<offload::ParamStore> store,
                  int64_t window_bytes, absl::Duration timeout,
                  std::shared_ptr<comm::RankActivity> activity);
  TensorTransfers(const TensorTransfers&) = delete;
  TensorTransfers& operator=(const TensorTransfers&) = delete;
  // Waits for transfers that are under way.
  ~TensorTransfers();

  // Writes `tensor`, whose form is `form`, to a new region. First the window
  // must have room: the stream waits for bytes that go straight into a store's
  // memory, the host for others. Null if the tensor has to stay.
  MovedTensorPtr Write(const at::Tensor& tensor, const PackedForm& form,
                       std::string region);

  // Starts to read a tensor that is not in memory. `ahead` says that nobody
  // needs it yet.
  absl::Status StartRead(const MovedTensorPtr& moved, bool ahead);
  // Returns the tensor, read if need be, and once more if it could not be read
  // ahead. After DeadlineExceeded a later call waits on.
  absl::StatusOr<at::Tensor> Read(const MovedTensorPtr& moved);
  // Keeps a tensor that is being written in memory afterwards, until Drop().
  void Keep(const MovedTensorPtr& moved);
  // Frees the tensor's memory if the store has it and no transfer uses it.
  void Drop(const MovedTensorPtr& moved);

  // Tensors that are being read, were read or were kept, and are not dropped.
  const std::vector<MovedTensorPtr>& reading() const { return reading_; }
  bool HasRoomToRead(int64_t bytes) const {
    return reading_bytes_ + bytes <= window_bytes_;
  }

  // Erases the region, at once or when its transfer is over.
  void Abandon(const MovedTensorPtr& moved);
  // Finishes transfers that are over.
  void Poll();

  const offload::ParamStore& store() const { return *store_; }
  const TensorTransferStats& stats() const { return stats_; }
  // Returns the error of the first write that failed, once.
  absl::Status TakeFailure() {
    return std::exchange(failure_, absl::OkStatus());
  }
  // Returns memory that was dropped. Freeing it may run anybody's code, so do
  // it without a lock.
  std::vector<at::Tensor> TakeDropped();

 private:
  using Doing = MovedTensor::Doing;

  bool MakeRoomToWrite(const MovedTensor& moved);
  absl::Status StartWrite(MovedTensor& moved, const at::Tensor& tensor);
  absl::Status StartDown(MovedTensor& moved);
  absl::Status GiveToStore(MovedTensor& moved, absl::Time deadline);
  absl::Status StartReadToDevice(MovedTensor& moved, bool ahead);
  absl::Status ReadFromStore(MovedTensor& moved);
  absl::Status StartUp(MovedTensor& moved);

  // Waits for the device and the store. DeadlineExceeded: something is under
  // way.
  absl::Status Settle(const MovedTensorPtr& moved, absl::Time deadline);
  absl::Status FinishDown(MovedTensor& moved, absl::Time deadline);
  absl::Status FinishWrite(MovedTensor& moved, absl::Time deadline);
  absl::Status FinishRead(const MovedTensorPtr& moved);
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
  DeviceStage* direct_stage_ = nullptr;  // its copies use `memory_`
  // Its copies may still use regions that were erased since the last wait for
  // them.
  bool direct_erased_ = false;
  std::vector<MovedTensorPtr> writing_;  // in the order of their start
  int64_t writing_bytes_ = 0;
  bool writes_hang_ = false;  // no write has ended since a wait timed out
  std::vector<MovedTensorPtr> reading_;
  int64_t reading_bytes_ = 0;
  std::vector<at::Tensor> dropped_;
  absl::Status failure_;
  TensorTransferStats stats_;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_TENSOR_TRANSFERS_H_
