#include "comm/nccl/nccl_group.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/connect_together.h"

namespace fsdp::comm {
namespace {

// The longest wait of a leaving rank for its operations to end, and then for
// its peers to leave, too.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);
// The longest time that the memory of a failed group may be in use.
constexpr absl::Duration kFailedTimeout = absl::Seconds(5);

constexpr int kFirstVersionWithWindows = NCCL_VERSION(2, 27, 0);
constexpr int kFirstVersionThatAborts = NCCL_VERSION(2, 29, 7);

using RegisterFunction = decltype(&ncclCommWindowRegister);
using DeregisterFunction = decltype(&ncclCommWindowDeregister);

// Finds a function by name, since older libraries lack some.
template <typename Function>
Function Find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

bool HasVersion(int least) {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess && version >= least;
}

// Returns true while `stream`, of the current device, is captured into a CUDA
// graph.
absl::StatusOr<bool> IsBeingCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaStreamIsCapturing(stream, &status),
                   "ask whether a CUDA stream is being captured"));
  return status != cudaStreamCaptureStatusNone;
}

// Frees memory of the current device. A call fails here only if the group or
// the device has failed, which other calls report.
void Free(NcclGroup& group, void* data, ncclWindow_t window) {
  static_cast<void>(cudaDeviceSynchronize());  // kernels may be reading it
  if (window != nullptr) {
    const auto deregister =
        Find<DeregisterFunction>("ncclCommWindowDeregister");
    group.handle()
        .Call("deregister a window", absl::Now() + group.timeout(),
              [=](ncclComm_t comm) { return deregister(comm, window); })
        .IgnoreError();
  }
  static_cast<void>(ncclMemFree(data));
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclEvent>> NcclEvent::Create() {
  int device = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDevice(&device), "ask for the current GPU"));
  cudaEvent_t event = nullptr;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                   "create a CUDA event"));
  return std::unique_ptr<NcclEvent>(new NcclEvent(
      event, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))));
}

// Fails only if the whole device has failed, which other calls report.
NcclEvent::~NcclEvent() {
  TorchToStatus("destroy a CUDA event", [this] {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<void>(cudaEventDestroy(event_));
  }).IgnoreError();
}

absl::Status NcclEvent::Record(cudaStream_t stream) {
  return CudaToStatus(cudaEventRecord(event_, stream), "record a CUDA event");
}

absl::StatusOr<bool> NcclEvent::IsDone() const {
  cudaError_t result = cudaSuccess;
  FSDP_RETURN_IF_ERROR(TorchToStatus("look after a GPU", [&] {
    const c10::cuda::CUDAGuard guard(device_);
    // Without this, a capture may forbid the query and fail itself.
    const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(
        cudaStreamCaptureModeRelaxed);
    result = cudaEventQuery(event_);
  }));
  if (result == cudaErrorNotReady) {
    // Clears the error, so that no later call reports it.
    static_cast<void>(cudaGetLastError());
    return false;
  }
  FSDP_RETURN_IF_ERROR(CudaToStatus(result, "an operation on the device"));
  return true;
}

absl::Status NcclEvent::Block(cudaStream_t stream) const {
  return CudaToStatus(cudaStreamWaitEvent(stream, event_, 0),
                      "make a CUDA stream wait");
}

absl::StatusOr<std::shared_ptr<NcclEvent>> NcclEventPool::Take() {
  std::unique_ptr<NcclEvent> event;
  {
    absl::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    FSDP_ASSIGN_OR_RETURN(event, NcclEvent::Create());
  }
  return std::shared_ptr<NcclEvent>(
      event.release(), [pool = shared_from_this()](NcclEvent* used) {
        absl::MutexLock lock(&pool->mutex_);
        pool->free_.emplace_back(used);
      });
}

NcclGroup::NcclGroup(std::unique_ptr<NcclHandle> handle, c10::Device device,
                     std::unique_ptr<ReportExchange> reports,
                     const WatchedGroup::Options& options)
    : handle_(std::move(handle)),
      device_(device),
      watched_(std::move(reports), options,
               {[this] { return handle_->Health(); },
                [this] { handle_->Abort(); }}) {}

absl::StatusOr<std::shared_ptr<NcclGroup>> NcclGroup::Create(
    std::unique_ptr<NcclHandle> handle, c10::Device device,
    const c10::intrusive_ptr<c10d::Store>& store,
    const WatchedGroup::Options& options) {
  FSDP_ASSIGN_OR_RETURN(
      auto reports,
      ReportExchange::Create(store, options.rank, options.names.size()));
  std::shared_ptr<NcclGroup> group(
      new NcclGroup(std::move(handle), device, std::move(reports), options));
  FSDP_RETURN_IF_ERROR(TorchToStatus("create a CUDA stream", [&] {
    const c10::cuda::CUDAGuard guard(device);
    return group->CreateStream();
  }));
  FSDP_RETURN_IF_ERROR(group->watched_.Start());
  return group;
}

NcclGroup::~NcclGroup() {
  Leave();
  if (stream_ == nullptr) return;
  // Fails only if the whole device has failed, which other calls report.
  TorchToStatus("destroy a CUDA stream", [this] {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<void>(cudaStreamDestroy(stream_));
  }).IgnoreError();
}

absl::Status NcclGroup::CreateStream() {
  int lowest = 0;
  int highest = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                   "ask for the priorities of CUDA streams"));
  FSDP_RETURN_IF_ERROR(CudaToStatus(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
      "create a CUDA stream"));
  FSDP_ASSIGN_OR_RETURN(ready_, NcclEvent::Create());
  return absl::OkStatus();
}

void NcclGroup::Leave() {
  watched_.Leave(kLeaveTimeout,
                 [this] { handle_->Close(absl::Now() + kLeaveTimeout); });
}

absl::StatusOr<std::shared_ptr<NcclGroup::Operation>> NcclGroup::Launch(
    Call call, int64_t bytes, Enqueue enqueue, Finish finish) {
  FSDP_ASSIGN_OR_RETURN(auto entry, watched_.Begin(std::move(call), bytes));
  auto operation = Run(entry, enqueue, finish);
  if (!operation.ok()) return watched_.NotLaunched(*entry, operation.status());
  if ((*operation)->is_captured) {
    watched_.Launched(*entry, [] { return true; });
  } else {
    watched_.Launched(*entry,
                      [done = (*operation)->done] { return done->IsDone(); });
  }
  return operation;
}

// The group's stream joins a capture by waiting for an event of it.
absl::StatusOr<std::shared_ptr<NcclGroup::Operation>> NcclGroup::Run(
    std::shared_ptr<WatchedGroup::Operation> entry, Enqueue enqueue,
    Finish finish) {
  std::shared_ptr<NcclEvent> done;
  bool is_captured = false;
  const auto run = [&]() -> absl::Status {
    const c10::cuda::CUDAGuard guard(device_);
    const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
    FSDP_ASSIGN_OR_RETURN(is_captured, comm::IsBeingCaptured(current.stream()));
    FSDP_RETURN_IF_ERROR(ready_->Record(current.stream()));
    FSDP_RETURN_IF_ERROR(ready_->Block(stream_));
    FSDP_RETURN_IF_ERROR(handle_->Enqueue(entry->name(), [&](ncclComm_t comm) {
      return enqueue(comm, stream_);
    }));
    {
      const c10::cuda::CUDAStreamGuard on_stream(
          c10::cuda::getStreamFromExternal(stream_, device_.index()));
      finish();
    }
    FSDP_ASSIGN_OR_RETURN(done, events_->Take());
    return done->Record(stream_);
  };
  FSDP_RETURN_IF_ERROR(TorchToStatus([&] { return entry->name(); }, run));
  return std::make_shared<Operation>(
      Operation{std::move(entry), std::move(done), is_captured});
}

absl::StatusOr<bool> NcclGroup::IsBeingCaptured() const {
  absl::StatusOr<bool> result;
  FSDP_RETURN_IF_ERROR(TorchToStatus("use a GPU", [&] {
    const c10::cuda::CUDAGuard guard(device_);
    result = comm::IsBeingCaptured(
        c10::cuda::getCurrentCUDAStream(device_.index()).stream());
  }));
  return result;
}

absl::Status NcclGroup::Wait(const Operation& operation, absl::Time deadline) {
  if (operation.is_captured) {
    return absl::FailedPreconditionError(absl::StrCat(
        watched_.Describe(*operation.entry),
        ": it is part of a CUDA graph and runs when that does; wait for the "
        "stream that the graph is launched on"));
  }
  return watched_.Wait(*operation.entry, deadline);
}

absl::Status NcclGroup::BlockCurrentStream(const Operation& operation) {
  FSDP_RETURN_IF_ERROR(watched_.Check(*operation.entry));
  return TorchToStatus(
      [&] { return operation.entry->name(); },
      [&] {
        const c10::cuda::CUDAGuard guard(device_);
        return operation.done->Block(
            c10::cuda::getCurrentCUDAStream(device_.index()).stream());
      });
}

void NcclGroup::Keep(const Operation& operation,
                     std::vector<at::Tensor> tensors) {
  watched_.Keep(*operation.entry,
                std::make_shared<std::vector<at::Tensor>>(std::move(tensors)));
}

bool HasNcclWindows() {
  return HasVersion(kFirstVersionWithWindows) &&
         Find<RegisterFunction>("ncclCommWindowRegister") != nullptr &&
         Find<DeregisterFunction>("ncclCommWindowDeregister") != nullptr;
}

bool HasAbortableNcclWindows() {
  return HasNcclWindows() && HasVersion(kFirstVersionThatAborts);
}

NcclMemory::NcclMemory(std::shared_ptr<NcclGroup> group, void* data,
                       int64_t bytes)
    : group_(std::move(group)),
      data_(data),
      bytes_(bytes),
      window_(std::make_shared<ncclWindow_t>(nullptr)) {}

absl::StatusOr<std::shared_ptr<NcclMemory>> NcclMemory::Allocate(
    std::shared_ptr<NcclGroup> group, int64_t bytes) {
  void* data = nullptr;
  absl::Status status;
  FSDP_RETURN_IF_ERROR(TorchToStatus("allocate for NCCL", [&] {
    const c10::DeviceGuard guard(group->device());
    status = NcclToStatus(ncclMemAlloc(&data, static_cast<size_t>(bytes)),
                          absl::StrCat("allocate ", bytes, " bytes for NCCL"));
  }));
  if (!status.ok()) {
    static_cast<void>(cudaGetLastError());  // clears the error
    return absl::ResourceExhaustedError(status.message());
  }
  return std::shared_ptr<NcclMemory>(
      new NcclMemory(std::move(group), data, bytes));
}

// Has a time limit, since the thread that watches the group may call this.
NcclMemory::~NcclMemory() {
  const auto free = [group = group_, data = data_, window = window_] {
    static_cast<void>(cudaSetDevice(group->device().index()));
    Free(*group, data, *window);
  };
  const absl::Duration patience =
      group_->failed() ? kFailedTimeout : group_->timeout();
  static_cast<void>(CallInTime(free, absl::Now() + patience));
}

absl::Status NcclMemory::Register(bool is_symmetric) {
  const auto register_window = Find<RegisterFunction>("ncclCommWindowRegister");
  const int flags = is_symmetric ? NCCL_WIN_COLL_SYMMETRIC : NCCL_WIN_DEFAULT;
  return group_->handle().Call(
      absl::StrCat("register ", bytes_, " bytes as a window"),
      absl::Now() + group_->timeout(),
      [register_window, data = data_, bytes = bytes_, window = window_,
       flags](ncclComm_t comm) {
        return register_window(comm, data, static_cast<size_t>(bytes),
                               window.get(), flags);
      });
}

at::Tensor NcclMemory::AsTensor(const std::shared_ptr<NcclMemory>& memory) {
  return at::for_blob(memory->data_, {memory->bytes_})
      .deleter([memory](void* /*data*/) {})
      .options(
          at::TensorOptions().dtype(at::kByte).device(memory->group_->device()))
      .target_device(memory->group_->device())
      .make_tensor();
}

absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps) {
  FSDP_ASSIGN_OR_RETURN(const bool is_allocated,
                        steps.true_on_all(steps.allocate().ok()));
  if (!is_allocated) return WindowOutcome::kNoMemory;
  absl::Status registered = steps.register_window();
  // The other ranks may still be in register_window().
  if (absl::IsAborted(registered) || absl::IsDeadlineExceeded(registered)) {
    return registered;
  }
  FSDP_ASSIGN_OR_RETURN(const bool is_registered,
                        steps.true_on_all(registered.ok()));
  return is_registered ? WindowOutcome::kWindow : WindowOutcome::kRefused;
}

}  // namespace fsdp::comm
