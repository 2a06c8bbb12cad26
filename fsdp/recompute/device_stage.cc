#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/locked_pages.h"
#include "fsdp/recompute/tensor_transfers.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

int64_t BytesOf(const at::Tensor& memory) {
  return static_cast<int64_t>(memory.nbytes());
}

// Returns an allocator of whole pages, which stores move fastest. It lives as
// long as its pages.
BufferPool::Allocate AllocatePages(c10::Device device) {
  return [pages = std::make_shared<LockedPages>(device)](
             int64_t bytes) -> absl::StatusOr<at::Tensor> {
    bytes = offload::StoredBytes(bytes);
    FSDP_ASSIGN_OR_RETURN(char* const memory, pages->Allocate(bytes));
    return at::from_blob(
        memory, {bytes},
        [pages, bytes](void* data) {
          pages->Free(static_cast<char*>(data), bytes);
        },
        at::TensorOptions(at::kByte));
  };
}

// Runs `copy` on `stream` and returns the event behind it.
absl::StatusOr<SharedEvent> CopyOn(const SideStream& stream,
                                   absl::string_view what,
                                   absl::FunctionRef<void()> copy) {
  auto done = std::make_shared<DeviceEvent>();
  FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
    const c10::NoGradGuard no_grad;
    const SideStream::Scope beside(stream);
    copy();
    done->Record(stream.device());
  }));
  return done;
}

at::Tensor FirstOf(const at::Tensor& host, const at::Tensor& memory) {
  return host.narrow(0, 0, memory.numel());
}

}  // namespace

DeviceStage::DeviceStage(c10::Device device, absl::Duration timeout)
    : device_(device),
      timeout_(timeout),
      up_(device),
      down_(device),
      pages_(AllocatePages(device)) {}

DeviceStage::~DeviceStage() {
  const absl::Status ended = AwaitAll(absl::Now() + timeout_);
  if (!ended.ok()) {
    TORCH_WARN("fsdp: ", ended.ToString());
  }
}

c10::Stream DeviceStage::CurrentStream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

absl::StatusOr<SharedEvent> DeviceStage::Now() const {
  auto now = std::make_shared<DeviceEvent>();
  FSDP_RETURN_IF_ERROR(TorchToStatus("recording an event of the device",
                                     [&] { now->Record(device_); }));
  return now;
}

absl::StatusOr<at::Tensor> DeviceStage::Acquire(int64_t bytes) {
  return pages_.Acquire(bytes);
}

void DeviceStage::Release(const at::Tensor& host, SharedEvent last) {
  leaving_.push_back({host, std::move(last), /*host=*/true});
  leaving_bytes_ += BytesOf(host);
}

void DeviceStage::Keep(at::Tensor memory, SharedEvent last) {
  leaving_.push_back({std::move(memory), std::move(last), /*host=*/false});
}

absl::Status DeviceStage::MakeRoom(int64_t bytes, int64_t limit,
                                   absl::Time deadline) {
  while (leaving_bytes_ > 0 && leaving_bytes_ + bytes > limit) {
    FSDP_RETURN_IF_ERROR(AwaitFirstLeaving(deadline));
  }
  return absl::OkStatus();
}

void DeviceStage::Poll() {
  while (!leaving_.empty() && AwaitFirstLeaving(absl::InfinitePast()).ok()) {
  }
}

// A device that has failed copies nothing: its memory leaves, too.
absl::Status DeviceStage::AwaitFirstLeaving(absl::Time deadline) {
  absl::Status reached = Await(leaving_.front().last, deadline);
  if (absl::IsDeadlineExceeded(reached)) return reached;
  const Leaving first = std::move(leaving_.front());
  leaving_.pop_front();
  if (first.host) {
    leaving_bytes_ -= BytesOf(first.memory);
    pages_.Release(first.memory);
  } else {
    kept_.push_back(first.memory);
  }
  return absl::OkStatus();
}

absl::StatusOr<SharedEvent> DeviceStage::Down(const at::Tensor& memory,
                                              const at::Tensor& host) {
  FSDP_RETURN_IF_ERROR(TorchToStatus("copying from the device",
                                     [&] { down_.FollowCurrentStream(); }));
  return CopyOn(down_, "copying from the device", [&] {
    FirstOf(host, memory).copy_(memory, /*non_blocking=*/true);
  });
}

absl::StatusOr<SharedEvent> DeviceStage::Up(const at::Tensor& host,
                                            const SharedEvent& host_ready,
                                            const at::Tensor& memory,
                                            const SharedEvent& memory_ready) {
  return CopyOn(up_, "copying to the device", [&] {
    if (host_ready != nullptr) host_ready->BlockCurrentStream();
    memory_ready->BlockCurrentStream();
    memory.copy_(FirstOf(host, memory), /*non_blocking=*/true);
  });
}

absl::Status DeviceStage::OrderDown(const SharedEvent& last) {
  if (last == nullptr) return absl::OkStatus();
  return TorchToStatus("ordering copies from the device", [&] {
    const SideStream::Scope beside(down_);
    last->BlockCurrentStream();
  });
}

absl::Status DeviceStage::Order(c10::Stream stream,
                                const SharedEvent& event) const {
  return TorchToStatus("ordering what the device computes", [&] {
    const c10::OptionalStreamGuard current(stream);
    event->BlockCurrentStream();
  });
}

absl::Status DeviceStage::Use(const at::Tensor& memory, c10::Stream owner,
                              const SharedEvent& event) const {
  const c10::Stream current = CurrentStream();
  FSDP_RETURN_IF_ERROR(Order(current, event));
  if (current == owner) return absl::OkStatus();
  // The memory goes back to `owner`, which does not know this stream.
  return TorchToStatus("ordering what the device computes", [&] {
    c10::impl::VirtualGuardImpl(device_.type())
        .recordDataPtrOnStream(memory.storage().data_ptr(), current);
  });
}

absl::Status DeviceStage::Await(const SharedEvent& event,
                                absl::Time deadline) const {
  if (event == nullptr) return absl::OkStatus();
  bool reached = false;
  FSDP_RETURN_IF_ERROR(TorchToStatus("waiting for a copy of the device",
                                     [&] { reached = event->Wait(deadline); }));
  if (reached) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat(device_.str(),
                   " has not come to the end of a copy in time: it hangs, or "
                   "has more to do"));
}

absl::Status DeviceStage::AwaitAll(absl::Time deadline) {
  for (const SideStream* stream : {&up_, &down_}) {
    FSDP_ASSIGN_OR_RETURN(
        const SharedEvent all,
        CopyOn(*stream, "waiting for copies of the device", [] {}));
    FSDP_RETURN_IF_ERROR(Await(all, deadline));
  }
  return absl::OkStatus();
}

}  // namespace fsdp
