#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

// A collective of the host's group and the copy of its result. Whoever waits
// first starts the copy, on its stream.
class StagedWork final : public Work {
 public:
  StagedWork(std::unique_ptr<Work> work, std::string what, at::Tensor target,
             at::Tensor result, bool accumulates, absl::Duration timeout)
      : work_(std::move(work)),
        what_(std::move(what)),
        target_(std::move(target)),
        result_(std::move(result)),
        accumulates_(accumulates),
        timeout_(timeout) {
    called_.Record(target_.device());
  }
  ~StagedWork() override { CopyBack(absl::Now() + timeout_).IgnoreError(); }

  absl::Status Wait(absl::Time deadline) override {
    FSDP_RETURN_IF_ERROR(CopyBack(deadline));
    bool is_there = false;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(what_, [&] { is_there = copied_.Wait(deadline); }));
    if (is_there) return absl::OkStatus();
    return absl::DeadlineExceededError(
        absl::StrCat(what_, ": the result is not on the device"));
  }

  absl::Status BlockCurrentStream() override {
    FSDP_RETURN_IF_ERROR(CopyBack(absl::Now() + timeout_));
    return TorchToStatus(what_, [this] { copied_.BlockCurrentStream(); });
  }

 private:
  absl::Status CopyBack(absl::Time deadline) {
    if (status_) return *status_;
    status_ = work_->Wait(deadline);
    if (status_->ok()) {
      status_ = TorchToStatus(what_, [this] {
        const c10::NoGradGuard no_grad;
        called_.BlockCurrentStream();
        if (accumulates_) {
          target_.add_(CopyToDevice(result_, target_.device()));
        } else {
          target_.copy_(result_, /*non_blocking=*/true);
        }
        copied_.Record(target_.device());
      });
    }
    target_.reset();
    result_.reset();
    return *status_;
  }

  const std::unique_ptr<Work> work_;
  const std::string what_;
  at::Tensor target_;
  at::Tensor result_;  // on the host
  const bool accumulates_;
  const absl::Duration timeout_;
  DeviceEvent called_;
  DeviceEvent copied_;
  std::optional<absl::Status> status_;  // of the copy
};

class StagedCommunicator final : public ForwardingCommunicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> host, c10::Device device)
      : ForwardingCommunicator(std::move(host)), device_(device) {}

  std::string ToString() const override {
    return absl::StrCat("staged on ", device_.str(), " over ",
                        base().ToString());
  }
  bool HasCommonMemory() const override { return false; }
  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    return Communicator::AllocateCommon(bytes);
  }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes, device_);
  }
  CreatedCommunicator Split(int color, int key) override {
    FSDP_ASSIGN_OR_RETURN(auto part, base().Split(color, key));
    return CreateStagedCommunicator(std::move(part), device_);
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const std::string what = absl::StrCat(CollectiveName(args.collective),
                                          " of ", label, " on ", Place());
    CollectiveArgs staged = args;
    // The output may not have the sums of before yet.
    const bool accumulates = args.scaled && args.scaled->accumulate;
    if (accumulates) staged.scaled->accumulate = false;
    bool is_there = false;
    FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
      const c10::NoGradGuard no_grad;
      const absl::Time deadline = absl::Now() + default_timeout();
      const HostCopy out = CopyToHost(args.out);
      staged.out = out.values;
      is_there = out.is_there.Wait(deadline);
      if (!args.in.defined()) return;
      const HostCopy in = CopyToHost(args.in);
      staged.in = in.values;
      is_there = in.is_there.Wait(deadline);
    }));
    if (!is_there) {
      return absl::DeadlineExceededError(
          absl::StrCat(what, ": the device has not computed its input"));
    }
    FSDP_ASSIGN_OR_RETURN(auto work, base().StartCollective(staged, label));
    return std::make_unique<StagedWork>(std::move(work), what, args.out,
                                        staged.out, accumulates,
                                        default_timeout());
  }

 private:
  const c10::Device device_;
};

}  // namespace

std::unique_ptr<Communicator> CreateStagedCommunicator(
    std::unique_ptr<Communicator> host, c10::Device device) {
  return std::make_unique<StagedCommunicator>(std::move(host), device);
}

ConnectDevice StagedBackend(c10::Device device) {
  return [device](const DeviceMeeting& meeting) -> CreatedCommunicator {
    c10::Device own = device;
    if (!own.has_index()) {
      FSDP_ASSIGN_OR_RETURN(own,
                            DeviceOfRank(device.type(), meeting.local_rank));
    }
    FSDP_ASSIGN_OR_RETURN(auto host,
                          meeting.host.Split(/*color=*/0, meeting.host.rank()));
    return CreateStagedCommunicator(std::move(host), own);
  };
}

}  // namespace fsdp::comm
