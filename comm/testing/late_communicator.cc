#include "comm/testing/late_communicator.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm::testing {
namespace {

class LateCommunicator final : public ForwardingCommunicator {
 public:
  LateCommunicator(std::unique_ptr<Communicator> base, Progress* progress,
                   std::set<Collective> late)
      : ForwardingCommunicator(std::move(base)),
        progress_(progress),
        late_(std::move(late)) {}

 private:
  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    FSDP_RETURN_IF_ERROR(BeLate(Collective::kAllGather));
    return Count(base().AllGather(out, in, label));
  }
  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    FSDP_RETURN_IF_ERROR(BeLate(Collective::kReduceScatter));
    return Count(base().ReduceScatter(out, in, op, label));
  }
  StartedWork DoAllToAll(const at::Tensor& out, const at::Tensor& in,
                         absl::string_view label) override {
    FSDP_RETURN_IF_ERROR(BeLate(Collective::kAllToAll));
    return Count(base().AllToAll(out, in, label));
  }
  StartedWork DoAllReduce(const at::Tensor& tensor, ReduceOp op,
                          absl::string_view label) override {
    FSDP_RETURN_IF_ERROR(BeLate(Collective::kAllReduce));
    return Count(base().AllReduce(tensor, op, label));
  }
  StartedWork DoBroadcast(const at::Tensor& tensor, int root,
                          absl::string_view label) override {
    FSDP_RETURN_IF_ERROR(BeLate(Collective::kBroadcast));
    return Count(base().Broadcast(tensor, root, label));
  }

  absl::Status BeLate(Collective collective) {
    if (late_.count(collective) == 0) return absl::OkStatus();
    return progress_->AwaitPeers(rank(), absl::Now() + default_timeout());
  }

  StartedWork Count(StartedWork work) {
    if (work.ok()) progress_->Start(rank());
    return work;
  }

  Progress* const progress_;
  const std::set<Collective> late_;
};

}  // namespace

void Progress::Start(int rank) {
  absl::MutexLock lock(&mutex_);
  ++started_[rank];
}

absl::Status Progress::AwaitPeers(int rank, absl::Time deadline) {
  const auto ahead = [this, rank]() {
    mutex_.AssertHeld();
    for (size_t peer = 0; peer < started_.size(); ++peer) {
      const bool behind = started_[peer] <= started_[rank];
      if (behind && static_cast<int>(peer) != rank) return false;
    }
    return true;
  };
  absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithDeadline(absl::Condition(&ahead), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", rank, " waits in vain for its peers to start collective #",
      started_[rank]));
}

std::unique_ptr<Communicator> StartLast(std::unique_ptr<Communicator> base,
                                        Progress* progress,
                                        std::set<Collective> late) {
  return std::make_unique<LateCommunicator>(std::move(base), progress,
                                            std::move(late));
}

}  // namespace fsdp::comm::testing
