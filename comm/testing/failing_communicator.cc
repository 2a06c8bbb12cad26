#include "comm/testing/failing_communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm::testing {

namespace {

class FailingCommunicator final : public ForwardingCommunicator {
 public:
  FailingCommunicator(std::unique_ptr<Communicator> base, FailurePlan plan)
      : ForwardingCommunicator(std::move(base)), plan_(std::move(plan)) {
    FSDP_CHECK(plan_.nth || plan_.label);
  }

 private:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    if (!Fits(label)) return base().StartCollective(args, label);
    base().Abort(plan_.error);
    return plan_.error;
  }

  bool Fits(absl::string_view label) {
    if (plan_.label && *plan_.label != label) return false;
    const int64_t call = num_candidates_++;
    return !plan_.nth || *plan_.nth == call;
  }

  const FailurePlan plan_;
  int64_t num_candidates_ = 0;  // calls that fit but for their number
};

}  // namespace

std::unique_ptr<Communicator> FailOnPlan(std::unique_ptr<Communicator> base,
                                         FailurePlan plan) {
  return std::make_unique<FailingCommunicator>(std::move(base),
                                               std::move(plan));
}

namespace {

class LateCommunicator final : public ForwardingCommunicator {
 public:
  LateCommunicator(std::unique_ptr<Communicator> base, Progress* progress,
                   std::set<Collective> late)
      : ForwardingCommunicator(std::move(base)),
        progress_(progress),
        late_(std::move(late)) {}

 private:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    if (late_.count(args.collective) > 0) {
      FSDP_RETURN_IF_ERROR(
          progress_->AwaitPeers(rank(), absl::Now() + default_timeout()));
    }
    StartedWork work = base().StartCollective(args, label);
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
