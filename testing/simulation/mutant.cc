#include "testing/simulation/mutant.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::simulation {
namespace {

using comm::Collective;
using comm::Communicator;
using comm::StartedWork;
using comm::Work;

class MutantWork final : public Work {
 public:
  MutantWork(std::unique_ptr<Work> base, Mutant mutant, bool waits)
      : base_(std::move(base)), mutant_(mutant), waits_(waits) {}

  absl::Status Wait(absl::Time deadline) override {
    if (!waits_) return absl::OkStatus();
    if (mutant_ == Mutant::kNoDeadlines) deadline += absl::Hours(10);
    const absl::Status status = mutant_ == Mutant::kNoInputWait
                                    ? base_->WaitForResult(deadline)
                                    : base_->Wait(deadline);
    return mutant_ == Mutant::kNoErrors ? absl::OkStatus() : status;
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    if (!waits_ || mutant_ != Mutant::kNone) return Wait(deadline);
    return base_->WaitForResult(deadline);
  }
  absl::Status BlockCurrentStream() override {
    return waits_ ? base_->BlockCurrentStream() : absl::OkStatus();
  }

 private:
  const std::unique_ptr<Work> base_;
  const Mutant mutant_;
  const bool waits_;
};

class NoFence final : public comm::Fence {
 public:
  explicit NoFence(std::unique_ptr<comm::Fence> base)
      : base_(std::move(base)) {}

  void Arrive() override { base_->Arrive(); }
  absl::Status Wait(absl::Time) override { return absl::OkStatus(); }

 private:
  const std::unique_ptr<comm::Fence> base_;
};

class MutantCommunicator final : public comm::ForwardingCommunicator {
 public:
  MutantCommunicator(std::unique_ptr<Communicator> base, Mutant mutant)
      : ForwardingCommunicator(std::move(base)), mutant_(mutant) {}

  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    FSDP_ASSIGN_OR_RETURN(comm::CommonMemory memory,
                          base().AllocateCommon(bytes));
    if (mutant_ == Mutant::kNoFenceWait) {
      memory.fence = std::make_unique<NoFence>(std::move(memory.fence));
    }
    return memory;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    FSDP_ASSIGN_OR_RETURN(auto part, base().Split(color, key));
    return Mutate(std::move(part), mutant_);
  }

 protected:
  StartedWork DoCollective(const comm::CollectiveArgs& args,
                           absl::string_view label) override {
    FSDP_ASSIGN_OR_RETURN(auto work, base().StartCollective(args, label));
    const bool forgets = (mutant_ == Mutant::kNoGatherWait &&
                          args.collective == Collective::kAllGather) ||
                         (mutant_ == Mutant::kNoReduceWait &&
                          args.collective == Collective::kReduceScatter) ||
                         (mutant_ == Mutant::kNoBroadcastWait &&
                          args.collective == Collective::kBroadcast);
    return std::make_unique<MutantWork>(std::move(work), mutant_, !forgets);
  }

 private:
  const Mutant mutant_;
};

class ForgetfulMemory final : public offload::testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;

  absl::StatusOr<std::unique_ptr<offload::Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override {
    if (++writes_ % 3 == 0) in = {};
    return ForwardingStore::Write(region, offset, in);
  }

 private:
  int64_t writes_ = 0;
};

}  // namespace

const char* ToString(Mutant mutant) {
  constexpr const char* kNames[] = {"none",
                                    "no gather wait",
                                    "no reduce wait",
                                    "no broadcast wait",
                                    "no input wait",
                                    "no fence wait",
                                    "no errors",
                                    "no deadlines",
                                    "no sync",
                                    "no folder sync",
                                    "late writes",
                                    "short disk moves",
                                    "short ssd moves",
                                    "forgetful memory"};
  return kNames[static_cast<int>(mutant)];
}

std::unique_ptr<Communicator> Mutate(std::unique_ptr<Communicator> base,
                                     Mutant mutant) {
  if (mutant == Mutant::kNone) return base;
  return std::make_unique<MutantCommunicator>(std::move(base), mutant);
}

std::unique_ptr<offload::ParamStore> MutateMemory(
    std::unique_ptr<offload::ParamStore> base, Mutant mutant) {
  if (mutant != Mutant::kForgetfulMemory) return base;
  return std::make_unique<ForgetfulMemory>(std::move(base));
}

}  // namespace fsdp::simulation
