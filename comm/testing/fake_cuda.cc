#include "comm/testing/fake_cuda.h"

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

// LibTorch's, which libtorch_cuda implements by the driver.
namespace c10::cuda::_internal {  // NOLINT(readability-identifier-naming)
void setHasPrimaryContext(bool (*has_context)(DeviceIndex device));
}  // namespace c10::cuda::_internal

struct CUstream_st {};

struct CUevent_st {
  bool is_captured = false;
};

namespace fsdp::comm::testing {
namespace {

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::atomic<int> threads{0};

struct Runtime {
  void Count(const char* function) {
    absl::MutexLock lock(&mutex);
    ++calls[function];
  }

  absl::Mutex mutex;
  std::map<std::string, int> calls ABSL_GUARDED_BY(mutex);
  std::vector<std::string> faults ABSL_GUARDED_BY(mutex);
  std::set<cudaStream_t> captured ABSL_GUARDED_BY(mutex);
};

Runtime& TheRuntime() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

}  // namespace

void FakeCuda::Reset() {
  c10::cuda::_internal::setHasPrimaryContext(
      [](c10::DeviceIndex /*device*/) { return true; });
  Runtime& runtime = TheRuntime();
  absl::MutexLock lock(&runtime.mutex);
  runtime.calls.clear();
  runtime.faults.clear();
  runtime.captured.clear();
}

std::map<std::string, int> FakeCuda::TakeCalls() {
  Runtime& runtime = TheRuntime();
  absl::MutexLock lock(&runtime.mutex);
  return std::exchange(runtime.calls, {});
}

void FakeCuda::BeginCapture() {
  Runtime& runtime = TheRuntime();
  absl::MutexLock lock(&runtime.mutex);
  runtime.captured.insert(nullptr);
}

void FakeCuda::EndCapture() {
  Runtime& runtime = TheRuntime();
  absl::MutexLock lock(&runtime.mutex);
  runtime.captured.clear();
}

std::vector<std::string> FakeCuda::Faults() {
  Runtime& runtime = TheRuntime();
  absl::MutexLock lock(&runtime.mutex);
  return runtime.faults;
}

int FakeCuda::num_threads() { return threads; }

}  // namespace fsdp::comm::testing

extern "C" {

using fsdp::comm::testing::capture_mode;
using fsdp::comm::testing::current_device;
using fsdp::comm::testing::Runtime;
using fsdp::comm::testing::TheRuntime;

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                   void* (*run)(void*), void* argument) noexcept {
  using Function = decltype(&pthread_create);
  static const auto create =
      reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pthread_create"));
  ++fsdp::comm::testing::threads;
  return create(thread, attributes, run, argument);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -2;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream,
                                         unsigned int /*flags*/,
                                         int /*priority*/) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus* status) {
  Runtime& runtime = TheRuntime();
  runtime.Count("cudaStreamIsCapturing");
  absl::MutexLock lock(&runtime.mutex);
  *status = runtime.captured.count(stream) > 0 ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event,
                                     unsigned int /*flags*/) {
  TheRuntime().Count("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  TheRuntime().Count("cudaEventDestroy");
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Runtime& runtime = TheRuntime();
  runtime.Count("cudaEventRecord");
  absl::MutexLock lock(&runtime.mutex);
  event->is_captured = runtime.captured.count(stream) > 0;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned int /*flags*/) {
  Runtime& runtime = TheRuntime();
  runtime.Count("cudaStreamWaitEvent");
  absl::MutexLock lock(&runtime.mutex);
  if (!event->is_captured) return cudaSuccess;
  if (runtime.captured.empty()) {
    runtime.faults.push_back("a stream waits for an event of another capture");
    return cudaErrorCapturedEvent;
  }
  runtime.captured.insert(stream);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Runtime& runtime = TheRuntime();
  runtime.Count("cudaEventQuery");
  absl::MutexLock lock(&runtime.mutex);
  if (event->is_captured) {
    runtime.faults.push_back("an event of a capture is asked for");
    return cudaErrorCapturedEvent;
  }
  if (!runtime.captured.empty() &&
      capture_mode != cudaStreamCaptureModeRelaxed) {
    runtime.faults.push_back("an event is asked for beside a capture");
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

}  // extern "C"
