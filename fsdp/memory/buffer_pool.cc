#include "fsdp/memory/buffer_pool.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

int64_t Bytes(const at::Tensor& buffer) {
  return static_cast<int64_t>(buffer.nbytes());
}

}  // namespace

BufferPool::BufferPool(Allocate allocate, int64_t room)
    : allocate_(std::move(allocate)), room_(room) {}

absl::StatusOr<at::Tensor> BufferPool::Acquire(int64_t bytes) {
  at::Tensor buffer;
  const auto fitting = Fitting(bytes);
  const bool has_room = stats_.reserved_bytes + bytes <= room_;
  if (fitting != free_.end() && !has_room) {
    FSDP_RETURN_IF_ERROR(AwaitUse(*fitting));
    buffer = std::move(fitting->buffer);
    free_.erase(fitting);
  } else {
    FSDP_RETURN_IF_ERROR(MakeRoom(bytes));
    FSDP_ASSIGN_OR_RETURN(buffer, allocate_(bytes));
    NoteNew(buffer);
    // A buffer that nobody has given back may have lain there.
    const auto place = PlaceOf(buffer);
    if (place != addresses_.end()) addresses_.erase(place);
    addresses_.push_back(buffer.const_data_ptr());
  }
  stats_.in_use_bytes += Bytes(buffer);
  stats_.peak_in_use_bytes =
      std::max(stats_.peak_in_use_bytes, stats_.in_use_bytes);
  return buffer;
}

std::vector<BufferPool::FreeBuffer>::iterator BufferPool::Fitting(
    int64_t bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t size = Bytes(it->buffer);
    if (!internal::Fits(size, bytes)) continue;
    if (best == free_.end() || size < Bytes(best->buffer)) best = it;
  }
  return best;
}

absl::Status BufferPool::AwaitUse(const FreeBuffer& free) {
  if (free.reader != nullptr) FSDP_RETURN_IF_ERROR(free.reader());
  free.used.BlockCurrentStream();
  return absl::OkStatus();
}

// Freed memory goes back to the current stream, which allocated it.
absl::Status BufferPool::MakeRoom(int64_t bytes) {
  if (room_ == 0) return absl::OkStatus();
  while (!free_.empty() && stats_.reserved_bytes + bytes > room_) {
    FSDP_RETURN_IF_ERROR(AwaitUse(free_.front()));
    LetGo(free_.front().buffer);
    free_.erase(free_.begin());
  }
  return absl::OkStatus();
}

void BufferPool::TakeBack(const at::Tensor& buffer) {
  FSDP_CHECK(Bytes(buffer) <= stats_.in_use_bytes);
  stats_.in_use_bytes -= Bytes(buffer);
}

void BufferPool::Release(const at::Tensor& buffer, AwaitReader reader,
                         DeviceEvent used) {
  TakeBack(buffer);
  free_.push_back({buffer, std::move(reader), std::move(used)});
}

void BufferPool::Discard(const at::Tensor& buffer) {
  TakeBack(buffer);
  LetGo(buffer);
  --stats_.allocations;
}

void BufferPool::NoteNew(const at::Tensor& buffer) {
  stats_.reserved_bytes += Bytes(buffer);
  ++stats_.allocations;
}

void BufferPool::LetGo(const at::Tensor& buffer) {
  stats_.reserved_bytes -= Bytes(buffer);
  const auto place = PlaceOf(buffer);
  if (place != addresses_.end()) addresses_.erase(place);
}

std::vector<const void*>::const_iterator BufferPool::PlaceOf(
    const at::Tensor& buffer) const {
  return std::find(addresses_.begin(), addresses_.end(),
                   buffer.const_data_ptr());
}

void BufferPool::Adopt(const at::Tensor& buffer, DeviceEvent used) {
  NoteNew(buffer);
  free_.push_back({buffer, /*reader=*/nullptr, std::move(used)});
}

void BufferPool::ForgetUses() {
  for (FreeBuffer& free : free_) {
    free.reader = nullptr;
    free.used = DeviceEvent();
  }
}

// What was not allocated here is this rank's alone: it comes last, by address.
void BufferPool::SortFree() {
  const auto key = [this](const FreeBuffer& free) {
    return std::make_pair(PlaceOf(free.buffer), free.buffer.const_data_ptr());
  };
  std::sort(free_.begin(), free_.end(),
            [key](const FreeBuffer& a, const FreeBuffer& b) {
              return key(a) < key(b);
            });
}

std::vector<at::Tensor> BufferPool::free_buffers() const {
  std::vector<at::Tensor> buffers;
  buffers.reserve(free_.size());
  for (const FreeBuffer& free : free_) buffers.push_back(free.buffer);
  return buffers;
}

}  // namespace fsdp
