#include "comm/c10d_backend/c10d_nccl.h"

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/c10d_backend/c10d_backend_communicator.h"
#include "comm/call.h"
#include "comm/group/c10d_status.h"
#include "comm/group/connect_together.h"
#include "comm/startup/rank_gpu.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// LibTorch's deadline ends the process, some minutes after it has passed.
constexpr auto kNoLimit = std::chrono::hours(24 * 20);

// How long a rank that leaves in peace may take for it.
constexpr auto kLeaveTimeout = std::chrono::seconds(5);

// Leaves errors to whoever asks for them.
class QuietNccl final : public c10d::ProcessGroupNCCL {
 public:
  QuietNccl(const StorePtr& store, int rank, int world_size,
            c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(store, rank, world_size, std::move(options)) {
    asyncErrorHandling_ = c10d::NoHandling;
  }

 protected:
  void terminateProcess(const std::string& /*why*/) override {}
};

void Shutdown(QuietNccl& nccl) {
  nccl.setTimeout(kLeaveTimeout);
  nccl.shutdown();
}

absl::StatusOr<C10dConnection> ConnectC10dNccl(const StorePtr& store,
                                               c10::Device device, int rank,
                                               const RankNames& names,
                                               absl::Duration timeout) {
  // NCCL waits without a deadline for those that do not come.
  FSDP_RETURN_IF_ERROR(ExchangeByStore(store, "c10d_nccl", rank, names,
                                       device.str(), absl::Now() + timeout)
                           .status());
  c10::intrusive_ptr<QuietNccl> nccl;
  FSDP_RETURN_IF_ERROR(C10dToStatus("set NCCL up", [&] {
    const c10::DeviceGuard guard(device);
    auto options = c10d::ProcessGroupNCCL::Options::create(
        /*is_high_priority_stream=*/true);
    options->timeout = kNoLimit;
    nccl = c10::make_intrusive<QuietNccl>(store, rank, names.size(), options);
    nccl->setBoundDeviceId(device);
    nccl->eagerConnectSingleDevice(device);
  }));
  C10dConnection connection;
  connection.backend = nccl;
  connection.leave = [raw = nccl.get()] { Shutdown(*raw); };
  return connection;
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(
    const StorePtr& store, int rank, int world_size,
    const C10dNcclOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const c10::Device device, FindGpu(options.device));
  const StorePtr meeting =
      c10::make_intrusive<c10d::PrefixStore>("connect", store);
  FSDP_ASSIGN_OR_RETURN(
      C10dConnection connection,
      ConnectC10dNccl(meeting, device, rank, RankNames(world_size),
                      options.timeout));
  C10dBackendOptions backend_options;
  backend_options.device = device;
  backend_options.timeout = options.timeout;
  backend_options.diagnosis_timeout = options.diagnosis_timeout;
  backend_options.connect =
      [device, timeout = options.timeout](const C10dMeeting& sub_group) {
        return ConnectC10dNccl(sub_group.store, device, sub_group.rank,
                               sub_group.names, timeout);
      };
  backend_options.is_capturing = [device] {
    const c10::DeviceGuard guard(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() !=
           c10::cuda::CaptureStatus::None;
  };
  return CreateC10dBackendCommunicator(std::move(connection), store,
                                       std::move(backend_options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateC10dNcclCommunicator(
    const StorePtr& store, int rank, int world_size,
    const C10dNcclOptions& options) {
  const std::string what = absl::StrCat("create the c10d nccl group on rank ",
                                        rank, " of ", world_size);
  if (store == nullptr || world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": there must be a store and 0 <= rank < world size"));
  }
  auto communicator = Create(store, rank, world_size, options);
  if (!communicator.ok()) return Annotate(communicator.status(), what);
  return communicator;
}

ConnectDevice C10dNcclBackend(const C10dNcclOptions& options) {
  return [options](const DeviceMeeting& meeting)
             -> absl::StatusOr<std::unique_ptr<Communicator>> {
    C10dNcclOptions own = options;
    own.timeout = meeting.timeout;
    FSDP_ASSIGN_OR_RETURN(own.device, TakeGpu(own.device, meeting.local_rank));
    return CreateC10dNcclCommunicator(meeting.store, meeting.host.rank(),
                                      meeting.host.world_size(), own);
  };
}

}  // namespace fsdp::comm
