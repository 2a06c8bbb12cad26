#include "comm/nccl_group.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/failure_report.h"

namespace fsdp::comm {
namespace {

// How often somebody looks whether the group is well.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);

// How long a rank that leaves waits for its operations to end, and then for its
// peers to leave, too.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);

NcclWatchdog::Failure FailureOf(Cause cause, std::string text) {
  NcclWatchdog::Failure failure;
  failure.report.cause = cause;
  failure.report.text = std::move(text);
  return failure;
}

}  // namespace

NcclGroup::NcclGroup(std::unique_ptr<NcclHandle> handle, c10::Device device,
                     int rank, int world_size, const Options& options)
    : handle_(std::move(handle)),
      device_(device),
      rank_(rank),
      world_size_(world_size),
      options_(options),
      watchdog_({[this] { return handle_->Health(); },
                 [this](const NcclWatchdog::Failure& failure) {
                   StopDevice(failure);
                 }}) {}

absl::StatusOr<std::shared_ptr<NcclGroup>> NcclGroup::Create(
    std::unique_ptr<NcclHandle> handle, c10::Device device, int rank,
    int world_size, const c10::intrusive_ptr<c10d::Store>& store,
    const Options& options) {
  std::shared_ptr<NcclGroup> group(
      new NcclGroup(std::move(handle), device, rank, world_size, options));
  FSDP_ASSIGN_OR_RETURN(group->monitor_,
                        GroupMonitor::Create(store, rank, world_size));
  absl::Status created;
  FSDP_RETURN_IF_ERROR(TorchToStatus("create a CUDA stream", [&] {
    const c10::cuda::CUDAGuard guard(device);
    created = group->CreateStream();
  }));
  FSDP_RETURN_IF_ERROR(created);
  group->monitor_->Start([raw = group.get()] {
    raw->watchdog_.Fail(FailureOf(Cause::kEcho, "another rank has failed"));
  });
  group->watchdog_.Start(kWatchInterval);
  return group;
}

NcclGroup::~NcclGroup() {
  Leave();
  if (stream_ == nullptr) return;
  // Fails where the whole device has, of which other calls tell.
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
  {
    absl::MutexLock lock(&mutex_);
    if (left_) return;
    left_ = true;
  }
  AwaitIdle(absl::Now() + kLeaveTimeout);
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  farewell.position = watchdog_.Position();
  // Before NCCL goes away, so that whoever notices can read it.
  if (monitor_ != nullptr) monitor_->Leave(farewell);
  if (watchdog_.idle()) {
    handle_->Close(absl::Now() + kLeaveTimeout);
  } else {
    watchdog_.Fail(FailureOf(Cause::kLeft, "this rank has left the group"));
  }
  watchdog_.Stop();
  if (monitor_ != nullptr) monitor_->Stop();
}

// A program ends without waiting for its device.
void NcclGroup::AwaitIdle(absl::Time deadline) {
  watchdog_.Poll(absl::Now());
  while (!watchdog_.idle() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
    watchdog_.Poll(absl::Now());
  }
  if (watchdog_.failure()) watchdog_.AwaitStopped();
}

void NcclGroup::Fail(const absl::Status& status) {
  watchdog_.Fail(status);
  watchdog_.AwaitStopped();
}

absl::StatusOr<std::shared_ptr<NcclGroup::Operation>> NcclGroup::Launch(
    Call call, int64_t bytes, Enqueue enqueue, Finish finish) {
  const auto entry =
      watchdog_.Begin(std::move(call), bytes, absl::Now() + options_.timeout);
  if (watchdog_.failure()) return ErrorOf(*entry);
  auto done = Run(*entry, enqueue, finish);
  if (!done.ok()) {
    watchdog_.Fail(done.status());
    return ErrorOf(*entry);
  }
  watchdog_.Launched(*entry, [event = *done] { return event->IsDone(); });
  return std::make_shared<Operation>(entry, *std::move(done));
}

absl::StatusOr<std::shared_ptr<const NcclEvent>> NcclGroup::Run(
    const NcclWatchdog::Operation& entry, Enqueue enqueue, Finish finish) {
  absl::Status status;
  std::unique_ptr<NcclEvent> done;
  const auto run = [&]() -> absl::Status {
    const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
    FSDP_RETURN_IF_ERROR(ready_->Record(current.stream()));
    FSDP_RETURN_IF_ERROR(ready_->Block(stream_));
    FSDP_RETURN_IF_ERROR(
        handle_->Call(entry.name(), absl::Now() + options_.timeout,
                      [&](ncclComm_t comm) { return enqueue(comm, stream_); }));
    {
      const c10::cuda::CUDAStreamGuard on_stream(
          c10::cuda::getStreamFromExternal(stream_, device_.index()));
      finish();
    }
    FSDP_ASSIGN_OR_RETURN(done, NcclEvent::Create());
    return done->Record(stream_);
  };
  FSDP_RETURN_IF_ERROR(TorchToStatus([&] { return entry.name(); },
                                     [&] {
                                       const c10::cuda::CUDAGuard guard(
                                           device_);
                                       status = run();
                                     }));
  FSDP_RETURN_IF_ERROR(status);
  return std::shared_ptr<const NcclEvent>(std::move(done));
}

absl::Status NcclGroup::Wait(const Operation& operation, absl::Time deadline) {
  absl::Duration pause = absl::Microseconds(5);
  while (true) {
    switch (watchdog_.StateOf(*operation.entry_)) {
      case NcclWatchdog::State::kDone:
        return absl::OkStatus();
      case NcclWatchdog::State::kFailed:
        return ErrorOf(*operation.entry_);
      case NcclWatchdog::State::kRunning:
        break;
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      watchdog_.Fail(FailureOf(Cause::kDeadline, "not done at the deadline"));
      continue;
    }
    absl::SleepFor(std::min(pause, deadline - now));
    pause = std::min(pause * 2, absl::Microseconds(200));
  }
}

absl::Status NcclGroup::BlockCurrentStream(const Operation& operation) {
  if (watchdog_.failure() &&
      watchdog_.StateOf(*operation.entry_) == NcclWatchdog::State::kFailed) {
    return ErrorOf(*operation.entry_);
  }
  absl::Status status;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      [&] { return operation.entry_->name(); },
      [&] {
        const c10::cuda::CUDAGuard guard(device_);
        status = operation.done_->Block(
            c10::cuda::getCurrentCUDAStream(device_.index()).stream());
      }));
  return status;
}

void NcclGroup::Keep(const Operation& operation,
                     std::vector<at::Tensor> tensors) {
  watchdog_.Keep(*operation.entry_,
                 std::make_shared<std::vector<at::Tensor>>(std::move(tensors)));
}

void NcclGroup::Abort(const absl::Status& reason) {
  watchdog_.Fail(FailureOf(Cause::kAbort, std::string(reason.message())));
}

void NcclGroup::StopDevice(const NcclWatchdog::Failure& failure) {
  if (monitor_ != nullptr) {
    // Leaves time for whoever waits to hear of a search that found nobody.
    monitor_->Report(failure.report, options_.diagnosis_timeout / 2);
  }
  handle_->Abort();
}

absl::Status NcclGroup::ErrorOf(const NcclWatchdog::Operation& entry) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(verdict.code(),
                      absl::StrCat(entry.Describe(rank_, world_size_), ": ",
                                   verdict.message()));
}

absl::Status NcclGroup::FindVerdict() {
  const NcclWatchdog::Failure failure = watchdog_.AwaitStopped();
  if (failure.status) return *failure.status;
  {
    absl::MutexLock lock(&mutex_);
    if (verdict_) return *verdict_;
  }
  GroupMonitor::Findings findings =
      monitor_->Await(absl::Now() + options_.diagnosis_timeout);
  absl::MutexLock lock(&mutex_);
  if (!verdict_) {
    findings.reports[rank_] = failure.report;
    verdict_ = Verdict(rank_, findings.reports, findings.store_answers);
  }
  return *verdict_;
}

}  // namespace fsdp::comm
