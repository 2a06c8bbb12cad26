#include <ATen/core/Tensor.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "testing/simulation/group.h"

namespace fsdp::simulation {
namespace {

using comm::Call;
using comm::Communicator;
using comm::Work;

class SimulatedWork final : public Work {
 public:
  SimulatedWork(std::shared_ptr<Group> group, int rank,
                std::shared_ptr<Operation> operation)
      : group_(std::move(group)),
        rank_(rank),
        operation_(std::move(operation)) {}
  ~SimulatedWork() override {
    if (!was_waited_for_) operation_->Drop(rank_);
  }

  absl::Status Wait(absl::Time deadline) override {
    return WaitFor(/*result_only=*/false, deadline);
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    return WaitFor(/*result_only=*/true, deadline);
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + group_->network().options.timeout);
  }

 private:
  absl::Status WaitFor(bool result_only, absl::Time deadline) {
    if (result_) return *result_;
    was_waited_for_ = true;
    absl::Status status =
        group_->Wait(rank_, operation_, result_only, deadline);
    if (!result_only || !status.ok()) result_ = status;
    return status;
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
  const std::shared_ptr<Operation> operation_;
  std::optional<absl::Status> result_;
  bool was_waited_for_ = false;
};

class SimulatedFence final : public comm::Fence {
 public:
  SimulatedFence(std::shared_ptr<Group> group, int rank, int64_t number)
      : group_(std::move(group)), rank_(rank), number_(number) {}

  void Arrive() override { group_->Arrive(rank_, number_); }
  absl::Status Wait(absl::Time deadline) override {
    return group_->AwaitFence(rank_, number_, deadline);
  }

 private:
  const std::shared_ptr<Group> group_;
  const int rank_;
  const int64_t number_;
};

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ~SimulatedCommunicator() override {
    if (unwinds()) group_->Abort(rank_, EndedByException());
    group_->Leave(rank_);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return group_->world_size(); }
  const comm::RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override { return options().timeout; }
  std::string ToString() const override {
    return absl::StrCat("simulated, ", Place());
  }
  bool PrefersScaledInputs() const override {
    return options().prefers_scaled_inputs;
  }
  bool HasAllToAll() const override { return options().has_all_to_all; }
  bool HasCommonMemory() const override { return options().has_common_memory; }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    FSDP_ASSIGN_OR_RETURN(at::Tensor memory, AllocatePlain(bytes));
    if (options().symmetric_is_collective) {
      FSDP_RETURN_IF_ERROR(group_->Barrier(
          rank_, absl::StrCat("symmetric memory of ", bytes, " bytes")));
    }
    if (bytes > 0) std::memset(memory.mutable_data_ptr(), 0xFF, bytes);
    return memory;
  }

  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    if (!HasCommonMemory()) return Communicator::AllocateCommon(bytes);
    if (bytes < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot allocate ", bytes, " bytes"));
    }
    comm::CommonMemory common;
    FSDP_ASSIGN_OR_RETURN(common.memory, group_->AllocateCommon(rank_, bytes));
    common.fence =
        std::make_unique<SimulatedFence>(group_, rank_, next_fence_++);
    return common;
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    if (color < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "split on ", Place(), ": color ", color, " is negative"));
    }
    FSDP_ASSIGN_OR_RETURN(auto seat, group_->Split(rank_, color, key));
    return std::make_unique<SimulatedCommunicator>(seat.first, seat.second);
  }

  void Abort(const absl::Status& reason) override {
    group_->Abort(rank_, reason);
  }

 protected:
  comm::StartedWork DoCollective(const comm::CollectiveArgs& args,
                                 absl::string_view label) override {
    const at::Tensor& counted = args.counted();
    const Call call =
        CallOf(args.collective, label, counted,
               args.scaled ? absl::StrCat("sum times ", args.scaled->scale)
                           : args.detail());
    if (!counted.device().is_cpu()) {
      return absl::UnimplementedError(
          absl::StrCat(comm::ToString(call), ": not on the CPU"));
    }
    const at::Tensor& in = args.in.defined() ? args.in : args.out;
    FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Operation> operation,
                          group_->Start(rank_, call, args.op, args.root,
                                        {args.out, in, args.scaled}));
    return std::make_unique<SimulatedWork>(group_, rank_, std::move(operation));
  }

  comm::StartedWork DoScaledSum(const comm::CollectiveArgs& args,
                                absl::string_view label) override {
    return options().scales_itself ? DoCollective(args, label)
                                   : Communicator::DoScaledSum(args, label);
  }

 private:
  const NetworkOptions& options() const { return group_->network().options; }

  const std::shared_ptr<Group> group_;
  const int rank_;
  int64_t next_fence_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> CreateSimulatedGroup(
    Network& network, std::vector<int> processes) {
  const comm::RankNames names(static_cast<int>(processes.size()));
  const std::shared_ptr<Group> group =
      Group::Make(network, std::move(processes), names);
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(group->world_size());
  for (int rank = 0; rank < group->world_size(); ++rank) {
    ranks.push_back(std::make_unique<SimulatedCommunicator>(group, rank));
  }
  return ranks;
}

}  // namespace fsdp::simulation
