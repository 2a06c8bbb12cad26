// Tensors on their way to a store and back.
#ifndef FSDP_TENSOR_TRANSFERS_H_
#define FSDP_TENSOR_TRANSFERS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "fsdp/packed_form.h"
#include "offload/param_store.h"
#include "offload/transfer.h"

namespace fsdp {

// A tensor that has a region of a store. The rest belongs to TensorTransfers.
struct MovedTensor {
  MovedTensor(PackedForm form, std::string region)
      : form(std::move(form)), region(std::move(region)) {}

  const PackedForm form;
  const std::string region;
  // Its bytes while they are in memory: until they are written, for ever if
  // that fails, and from the start of a read until Drop().
  at::Tensor packed;
  std::unique_ptr<offload::Transfer> transfer;  // goes before its memory
  bool writes = false;                          // what `transfer` does
  bool in_store = false;
  bool ahead = false;      // what is read, nobody has asked for yet
  bool wanted = false;     // stays in memory when it is written
  bool abandoned = false;  // nobody will ask for it
};
using MovedTensorPtr = std::shared_ptr<MovedTensor>;

struct TensorTransferStats {
  int64_t tensors_out = 0;  // whose writes have ended well
  int64_t bytes_out = 0;
  int64_t bytes_in = 0;
  int64_t full = 0;    // writes that the store had no room for
  int64_t failed = 0;  // and all others that came to nothing
  double waited_seconds = 0;
};

// Used by one thread at a time.
class TensorTransfers {
 public:
  // At most `window_bytes` are being written, or one tensor. `timeout`: of each
  // wait.
  TensorTransfers(std::unique_ptr<offload::ParamStore> store,
                  int64_t window_bytes, absl::Duration timeout);
  TensorTransfers(const TensorTransfers&) = delete;
  TensorTransfers& operator=(const TensorTransfers&) = delete;
  // Waits for what is under way.
  ~TensorTransfers();

  // Writes `tensor`, whose form is `form`, to a new region; waits first until
  // there is room for it in the window. Null when it has to stay where it is.
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
  std::vector<at::Tensor> TakeDropped() { return std::exchange(dropped_, {}); }

 private:
  bool MakeRoomToWrite(const MovedTensor& moved);
  bool Create(MovedTensor& moved);
  absl::Status StartWrite(MovedTensor& moved, const at::Tensor& tensor);
  absl::Status FinishRead(const MovedTensorPtr& moved);
  // Waits for the transfer; DeadlineExceeded while it is under way.
  absl::Status Settle(const MovedTensorPtr& moved, absl::Time deadline);
  void WriteIsOver(const MovedTensorPtr& moved, const absl::Status& result);
  void ReadIsOver(const MovedTensorPtr& moved, const absl::Status& result);
  void JoinReading(const MovedTensorPtr& moved);
  void LeaveReading(const MovedTensorPtr& moved);
  void Erase(MovedTensor& moved);
  void Failed(const absl::Status& status);

  const std::unique_ptr<offload::ParamStore> store_;
  const int64_t window_bytes_;
  const absl::Duration timeout_;
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

#endif  // FSDP_TENSOR_TRANSFERS_H_
