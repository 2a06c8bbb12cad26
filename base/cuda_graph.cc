#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/device_graph.h"
#include "base/torch_status.h"

namespace fsdp {
namespace {

// Stands for a pool of the capture's own.
constexpr c10::MempoolId_t kOwnPool = {0, 0};

class AbandonableGraph final : public at::cuda::CUDAGraph {
 public:
  // Ends a capture that is not to be used: capture_end() would leave the
  // allocator and the generators in it.
  void Abandon() {
    cudaGraph_t graph = nullptr;
    if (cudaStreamEndCapture(capture_stream_, &graph) == cudaSuccess &&
        graph != nullptr) {
      static_cast<void>(cudaGraphDestroy(graph));
    }
    // Clears the error, so that no later call reports it.
    static_cast<void>(cudaGetLastError());
    for (auto& [generator, increment] : captured_generator_states_) {
      generator->capturing_ = false;
    }
    // Either the capture has no pool yet, or reset() releases it.
    if (capture_dev_ == UNDEFINED_DEVICE || capture_ended_) return;
    namespace device = c10::cuda::CUDACachingAllocator;
    at::HostAllocator* const pinned = at::getHostAllocator(at::kCUDA);
    Try([&] { pinned->end_allocate_to_pool(mempool_id_); });
    Try([&] { pinned->release_pool(mempool_id_); });
    Try([&] { device::endAllocateToPool(capture_dev_, mempool_id_); });
    Try([&] { device::releasePool(capture_dev_, mempool_id_); });
  }

 private:
  // One that fails keeps none of the others from being done.
  static void Try(FallibleRef release) {
    TorchToStatus("end a capture", release).IgnoreError();
  }
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(c10::Device device) : device_(device) {}
  ~CudaGraph() override { CudaGraph::Reset(); }

  absl::Status BeginCapture() override {
    absl::Status status =
        TorchToStatus("begin the capture of a CUDA graph", [this] {
          const c10::cuda::CUDAGuard guard(device_);
          graph_ = std::make_unique<AbandonableGraph>();
          captures_ = true;
          graph_->capture_begin(kOwnPool, cudaStreamCaptureModeThreadLocal);
        });
    if (!status.ok()) Reset();
    return status;
  }

  absl::Status EndCapture() override {
    absl::Status status = TorchToStatus("capture a CUDA graph", [this] {
      const c10::cuda::CUDAGuard guard(device_);
      graph_->capture_end();
    });
    if (status.ok()) {
      captures_ = false;
    } else {
      Reset();
    }
    return status;
  }

  absl::Status Replay() override {
    if (graph_ == nullptr || captures_) {
      return absl::FailedPreconditionError(
          "replay a CUDA graph: nothing was captured");
    }
    return TorchToStatus("replay a CUDA graph", [this] { graph_->replay(); });
  }

  void Reset() override {
    if (graph_ == nullptr) return;
    TorchToStatus("forget a CUDA graph", [this] {
      const c10::cuda::CUDAGuard guard(device_);
      if (captures_) graph_->Abandon();
    }).IgnoreError();
    graph_.reset();
    captures_ = false;
  }

 private:
  const c10::Device device_;
  std::unique_ptr<AbandonableGraph> graph_;
  bool captures_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceGraph>> MakeCudaGraph(c10::Device device) {
  if (!device.is_cuda()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "capture a CUDA graph on ", device.str(), ", which is not a GPU"));
  }
  return std::make_unique<CudaGraph>(device);
}

}  // namespace fsdp
