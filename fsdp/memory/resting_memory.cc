#include "fsdp/memory/resting_memory.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/memory/device_copies.h"

namespace fsdp {
namespace {

using flat_param::Guarded;

constexpr char kNoLongerThere[] =
    "the model that this shard belongs to is no longer there";

// The longest time for which a device may use memory that is to be freed.
constexpr absl::Duration kLongest = absl::Minutes(1);

}  // namespace

RestingMemory::RestingMemory(int64_t bytes, c10::Device device,
                             const std::string& error,
                             std::unique_ptr<RestingPlace> place,
                             std::shared_ptr<DeviceCopies> copies,
                             std::shared_ptr<OffloadSpace> space)
    : bytes_(bytes),
      storage_(std::make_unique<flat_param::GuardedStorage>(
          bytes, device, error, Guarded::kResting)),
      place_(std::move(place)),
      copies_(std::move(copies)),
      error_(error),
      space_(std::move(space)) {
  FSDP_CHECK(device.is_cpu() || copies_ != nullptr);
  storage_->SetTag(this);
}

RestingMemory::RestingMemory(at::Tensor memory,
                             std::shared_ptr<OffloadSpace> space)
    : bytes_(static_cast<int64_t>(memory.nbytes())),
      storage_(std::make_unique<flat_param::GuardedStorage>(
          bytes_, memory.device(), kNoLongerThere, Guarded::kResting)),
      memory_(std::move(memory)),
      space_(std::move(space)) {
  storage_->SetTag(this);
  storage_->Fill(memory_.mutable_data_ptr());
}

// Waits, because the place's memory may be reused. A device that takes longer
// or reports an error has failed, which other calls report.
RestingMemory::~RestingMemory() {
  FSDP_CHECK((uses_ == 0 && host_uses_ == 0) || stays());
  if (used_ == nullptr) return;
  TorchToStatus("waiting for a device", [this] {
    used_->Wait(absl::Now() + kLongest);
  }).IgnoreError();
}

RestingMemory* RestingMemory::Of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const void* tag = flat_param::TagOf(
      tensor.unsafeGetTensorImpl()->unsafe_storage(), Guarded::kResting);
  return const_cast<RestingMemory*>(static_cast<const RestingMemory*>(tag));
}

at::Tensor RestingMemory::AsTensor(c10::ScalarType dtype) const {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return TensorOver(storage_->storage(), 0, {bytes() / size}, {1}, dtype);
}

void RestingMemory::Prefetch() {
  if (!stays() && uses_ == 0) place_->Prefetch();
}

bool RestingMemory::IsOnHost(Where where) const {
  return where == Where::kHost && copies_ != nullptr;
}

flat_param::GuardedStorage& RestingMemory::HostStorage() {
  if (host_storage_ == nullptr) {
    host_storage_ = std::make_unique<flat_param::GuardedStorage>(
        bytes(), at::kCPU, error_, Guarded::kResting);
  }
  return *host_storage_;
}

at::Tensor RestingMemory::OnHost(const at::Tensor& tensor) {
  if (!IsOnHost(Where::kHost)) return tensor;
  return TensorOver(HostStorage().storage(), tensor.storage_offset(),
                    tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

absl::Status RestingMemory::Acquire(Use use, Where where) {
  if (stays()) {
    ++uses_;
    return absl::OkStatus();
  }
  const bool on_host = IsOnHost(where);
  int& uses = on_host ? host_uses_ : uses_;
  if ((on_host ? uses_ : host_uses_) > 0) {
    return absl::FailedPreconditionError(
        "what rests elsewhere is wanted on the host and on its device at once: "
        "let one fsdp::Resident go first");
  }
  if (uses == 0) {
    FSDP_RETURN_IF_ERROR(on_host || copies_ == nullptr ? BringToHost(use)
                                                       : BringToDevice(use));
  }
  if (!on_host && arrived_ != nullptr) arrived_->BlockCurrentStream();
  if (use != Use::kRead && !changed_) {
    place_->MarkChanged();
    changed_ = true;
  }
  ++uses;
  return absl::OkStatus();
}

absl::Status RestingMemory::BringToHost(Use use) {
  if (copies_ != nullptr) {
    FSDP_RETURN_IF_ERROR(lost_);
    FSDP_RETURN_IF_ERROR(copies_->Await(used_));
  }
  FSDP_ASSIGN_OR_RETURN(char* const data, place_->Acquire(use));
  changed_ = use != Use::kRead;
  (copies_ == nullptr ? *storage_ : HostStorage()).Fill(data);
  return absl::OkStatus();
}

// Asks the place last: it counts memory that may be written as written.
absl::Status RestingMemory::BringToDevice(Use use) {
  FSDP_RETURN_IF_ERROR(lost_);
  FSDP_ASSIGN_OR_RETURN(const at::Tensor memory, copies_->Acquire(bytes()));
  const absl::StatusOr<char*> data = place_->Acquire(use);
  if (!data.ok()) {
    copies_->Release(memory, at::Tensor(), /*copies=*/false).IgnoreError();
    return data.status();
  }
  on_host_ = at::from_blob(*data, {bytes()}, at::TensorOptions(at::kByte));
  absl::StatusOr<SharedEvent> arrived = copies_->Upload(
      memory, on_host_, /*copies=*/use != Use::kOverwrite, used_);
  if (!arrived.ok()) {
    lost_ = arrived.status();
    place_->Release(used_);
    return lost_;
  }
  arrived_ = *std::move(arrived);
  memory_ = memory;
  changed_ = use != Use::kRead;
  storage_->Fill(memory_.mutable_data_ptr());
  return absl::OkStatus();
}

void RestingMemory::Release(Where where) {
  const bool on_host = IsOnHost(where);
  int& uses = on_host ? host_uses_ : uses_;
  FSDP_CHECK(uses > 0);
  if (--uses > 0 || stays()) return;
  const bool changed = std::exchange(changed_, false);
  if (on_host) {
    host_storage_->Empty();
    return place_->Release(nullptr);
  }
  storage_->Empty();
  if (copies_ != nullptr) {
    absl::StatusOr<SharedEvent> used =
        copies_->Release(memory_, on_host_, changed);
    lost_ = used.status();
    if (used.ok()) used_ = *std::move(used);
    memory_.reset();
  }
  place_->Release(used_);
}

absl::StatusOr<Resident> Resident::Of(absl::Span<const at::Tensor> tensors,
                                      Use use, Where where) {
  Resident resident;
  for (const at::Tensor& tensor : tensors) {
    FSDP_RETURN_IF_ERROR(resident.Add(tensor, use, where));
  }
  return resident;
}

absl::Status Resident::Add(const at::Tensor& tensor, Use use, Where where) {
  RestingMemory* const memory = RestingMemory::Of(tensor);
  if (memory == nullptr) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(memory->Acquire(use, where));
  held_.push_back({memory->shared_from_this(), where});
  return absl::OkStatus();
}

Resident& Resident::operator=(Resident&& other) noexcept {
  std::swap(held_, other.held_);
  return *this;
}

Resident::~Resident() {
  for (const Held& held : held_) held.memory->Release(held.where);
}

at::Tensor OnHost(const at::Tensor& tensor) {
  RestingMemory* const memory = RestingMemory::Of(tensor);
  return memory == nullptr ? tensor : memory->OnHost(tensor);
}

bool RestsElsewhere(const at::Tensor& tensor) {
  const RestingMemory* const memory = RestingMemory::Of(tensor);
  return memory != nullptr && !memory->stays();
}

void PrefetchTensor(const at::Tensor& tensor) {
  if (RestingMemory* const memory = RestingMemory::Of(tensor)) {
    memory->Prefetch();
  }
}

}  // namespace fsdp
