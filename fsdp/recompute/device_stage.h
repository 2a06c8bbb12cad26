// Copies tensors of a device to memory of the host and back, for
// tensor_transfers.cc alone.
#ifndef FSDP_RECOMPUTE_DEVICE_STAGE_H_
#define FSDP_RECOMPUTE_DEVICE_STAGE_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/device_copies.h"
#include "offload/param_store.h"

namespace fsdp {

// Copies on one stream up and one down while the device computes, through
// page-locked memory of the host that is used again, as much as was in use at
// once. LibTorch's pinned allocations would be rounded up to powers of two and
// kept for the life of the process. Used by one thread at a time. Errors other
// than DeadlineExceeded mean that the device has failed.
class DeviceStage {
 public:
  // `timeout` limits the destructor's wait.
  DeviceStage(c10::Device device, absl::Duration timeout)
      : device_(device),
        timeout_(timeout),
        up_(device),
        down_(device),
        pages_(AllocatePages(device)) {}
  // Makes the host wait for all copies.
  ~DeviceStage() {
    const absl::Status ended = AwaitAll(absl::Now() + timeout_);
    if (!ended.ok()) {
      TORCH_WARN("fsdp: ", ended.ToString());
    }
  }

  c10::Device device() const { return device_; }
  c10::Stream CurrentStream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  // Returns the point that the current stream's work has reached.
  absl::StatusOr<SharedEvent> Now() const {
    auto now = std::make_shared<DeviceEvent>();
    FSDP_RETURN_IF_ERROR(TorchToStatus("recording an event of the device",
                                       [&] { now->Record(device_); }));
    return now;
  }

  // Returns at least `bytes` of uninitialised host memory, 1-D.
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes) {
    return pages_.Acquire(bytes);
  }
  // Takes host memory back, free when `last`, maybe null, is reached.
  void Release(const at::Tensor& host, SharedEvent last) {
    leaving_.push_back({host, std::move(last), /*host=*/true});
    leaving_bytes_ += BytesOf(host);
  }
  // Makes the host wait until released memory that is not free yet, with
  // `bytes` of new memory, is at most `limit` bytes, or is all free.
  absl::Status MakeRoom(int64_t bytes, int64_t limit, absl::Time deadline) {
    while (leaving_bytes_ > 0 && leaving_bytes_ + bytes > limit) {
      FSDP_RETURN_IF_ERROR(AwaitFirstLeaving(deadline));
    }
    return absl::OkStatus();
  }
  // Keeps `memory` until `last` is reached.
  void Keep(at::Tensor memory, SharedEvent last) {
    leaving_.push_back({std::move(memory), std::move(last), /*host=*/false});
  }

  // Down() copies all of the device's `memory`, 1-D bytes, to the beginning of
  // `host`, after the current stream's work; Up() copies back, after both
  // events, of which `host_ready` may be null. Both return the end of the copy.
  absl::StatusOr<SharedEvent> Down(const at::Tensor& memory,
                                   const at::Tensor& host) {
    FSDP_RETURN_IF_ERROR(TorchToStatus("copying from the device",
                                       [&] { down_.FollowCurrentStream(); }));
    return CopyOn(down_, "copying from the device", [&] {
      FirstOf(host, memory).copy_(memory, /*non_blocking=*/true);
    });
  }
  absl::StatusOr<SharedEvent> Up(const at::Tensor& host,
                                 const SharedEvent& host_ready,
                                 const at::Tensor& memory,
                                 const SharedEvent& memory_ready) {
    return CopyOn(up_, "copying to the device", [&] {
      if (host_ready != nullptr) host_ready->BlockCurrentStream();
      memory_ready->BlockCurrentStream();
      memory.copy_(FirstOf(host, memory), /*non_blocking=*/true);
    });
  }
  // Makes later copies down wait for `last`, which may be null.
  absl::Status OrderDown(const SharedEvent& last) {
    if (last == nullptr) return absl::OkStatus();
    return TorchToStatus("ordering copies from the device", [&] {
      const SideStream::Scope beside(down_);
      last->BlockCurrentStream();
    });
  }

  // Makes later work of `stream` wait for `event`.
  static absl::Status Order(c10::Stream stream, const SharedEvent& event) {
    return TorchToStatus("ordering what the device computes",
                         [&] { event->Block(stream); });
  }
  // Makes the current stream wait for `event` before it uses `memory`, which
  // was allocated for the stream `owner`.
  absl::Status Use(const at::Tensor& memory, c10::Stream owner,
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

  // Makes the host wait for all copies.
  absl::Status AwaitAll(absl::Time deadline) {
    for (const SideStream* stream : {&up_, &down_}) {
      FSDP_ASSIGN_OR_RETURN(
          const SharedEvent all,
          CopyOn(*stream, "waiting for copies of the device", [] {}));
      FSDP_RETURN_IF_ERROR(AwaitCopy(all, deadline));
    }
    return absl::OkStatus();
  }

  // Finds memory whose last use is over.
  void Poll() {
    while (!leaving_.empty() && AwaitFirstLeaving(absl::InfinitePast()).ok()) {
    }
  }
  // Returns memory whose Keep() is over. Freeing it may run anybody's code, so
  // do it without a lock.
  std::vector<at::Tensor> TakeKept() { return std::exchange(kept_, {}); }

 private:
  struct Leaving {
    at::Tensor memory;
    SharedEvent last;
    bool host;
  };

  static int64_t BytesOf(const at::Tensor& memory) {
    return static_cast<int64_t>(memory.nbytes());
  }
  static at::Tensor FirstOf(const at::Tensor& host, const at::Tensor& memory) {
    return host.narrow(0, 0, memory.numel());
  }

  // Returns an allocator of whole pages, which stores move fastest. It lives as
  // long as its pages.
  static BufferPool::Allocate AllocatePages(c10::Device device) {
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
  static absl::StatusOr<SharedEvent> CopyOn(const SideStream& stream,
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

  // A device that has failed copies nothing: its memory leaves, too.
  absl::Status AwaitFirstLeaving(absl::Time deadline) {
    absl::Status reached = AwaitCopy(leaving_.front().last, deadline);
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

  const c10::Device device_;
  const absl::Duration timeout_;
  SideStream up_;
  SideStream down_;
  BufferPool pages_;
  std::deque<Leaving> leaving_;
  int64_t leaving_bytes_ = 0;  // of the host
  std::vector<at::Tensor> kept_;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_DEVICE_STAGE_H_
