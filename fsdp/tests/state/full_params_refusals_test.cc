// When whole parameters are refused, and what is refused while they exist.

#include "comm/testing/run_refused_ranks.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/full_params.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/sharded_toy.h"
#include "fsdp/tests/state/full_params_checks.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::testing::toy::kDim;
using ::fsdp::testing::toy::MakeModel;
using ::fsdp::testing::toy::Model;

class SummonsInForward : public torch::nn::Module {
 public:
  SummonsInForward()
      : linear(register_module("linear", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    refused = SummonFullParams(*linear).status();
    if (refused.ok()) refused = SummonFullParams(*this).status();
    return linear->forward(x);
  }
  torch::nn::Linear linear;
  absl::Status refused;
};

TEST(SummonFullParamsTest, IsRefusedInsideAForwardWhichGoesOn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<SummonsInForward>();
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    const at::Tensor y = model->forward(Rows(0, 2, kDim));
    FSDP_RETURN_IF_ERROR(
        Check(absl::IsFailedPrecondition(net->refused) &&
                  absl::StrContains(net->refused.message(), "inside a forward"),
              net->refused.ToString()));
    return model->Backward(y.sum());
  }));
}

TEST(SummonFullParamsTest, IsRefusedInsideABackwardWhichGoesOn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    at::Tensor x = Rows(0, 2, kDim);
    at::Tensor y = model->forward(x);
    absl::Status refused;
    y.register_hook([&](const at::Tensor& gradient) {
      refused = model->SummonFullParams().status();
      return gradient;
    });
    FSDP_RETURN_IF_ERROR(model->Backward(y.sum()));
    FSDP_RETURN_IF_ERROR(
        Check(absl::IsFailedPrecondition(refused), refused.ToString()));
    return Backward(model);
  }));
}

TEST(SummonFullParamsTest, InsideItEverythingElseIsRefusedByAllRanks) {
  using Misuse = std::function<absl::Status(Model&)>;
  const std::vector<Misuse> misuses = {
      [](Model& model) { return model->SummonFullParams().status(); },
      [](Model& model) {
        return SummonFullParams(*model.module()->blocks[0]).status();
      },
      [](Model& model) {
        return model->ForEachFullParameter(
            [](const std::string&, const at::Tensor&) {
              return absl::OkStatus();
            });
      },
      [](Model& model) {
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 2, kDim)); });
      },
      [](Model& model) { return Unshard(*model.module()).status(); },
      [](Model& model) { return model->RebuildFullParams().status(); },
      [](Model& model) { return model->SetGradientDivideFactors(2, 1); },
  };
  for (size_t i = 0; i < misuses.size(); ++i) {
    const auto run = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      absl::Status refused;
      {
        FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
        refused = misuses[i](model);
        FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      }
      FSDP_RETURN_IF_ERROR(Backward(model));
      return refused;
    };
    EXPECT_THAT(RunRefusedRanks(2, run),
                Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                              HasSubstr("whole for SummonFullParams()"))))
        << "misuse " << i;
  }
}

TEST(SummonFullParamsTest, ABackwardOfAnEarlierGraphIsRefusedInsideIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const at::Tensor loss = model->forward(Rows(0, 2, kDim)).sum();
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
    return Check(absl::IsFailedPrecondition(model->Backward(loss)), "allowed");
  }));
}

TEST(SummonFullParamsTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    SummonOptions options;
    options.writeback = world.rank() == 0;
    absl::Status refused = model->SummonFullParams(options).status();
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("the options of SummonFullParams()"))));
}

// Takes whole access on this rank alone.
class WholeInUse {
 public:
  explicit WholeInUse(ShardedModel& model) : model_(model) {
    ThrowIfError(model_.BeginWholeAccess("a test"));
  }
  WholeInUse(const WholeInUse&) = delete;
  WholeInUse& operator=(const WholeInUse&) = delete;
  ~WholeInUse() { model_.EndWholeAccess(); }

 private:
  ShardedModel& model_;
};

TEST(ForEachFullParameterTest, AVisitorThatFailsOnOneRankFailsOnAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    absl::Status failed = model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor&) {
          return Check(world.rank() != 1 || name != "head.bias", "my disk");
        },
        VisitOptions{/*writeback=*/true});
    FSDP_RETURN_IF_ERROR(Backward(model));
    return failed;
  };
  EXPECT_THAT(
      RunRefusedRanks(3, run),
      Each(StatusIs(absl::StatusCode::kInternal, HasSubstr("my disk"))));
}

TEST(ForEachFullParameterTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    VisitOptions options;
    options.rank0_only = world.rank() == 0;
    absl::Status refused = model->ForEachFullParameter(
        [](auto&, auto&) { return absl::OkStatus(); }, options);
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(
      RunRefusedRanks(3, run),
      Each(StatusIs(absl::StatusCode::kInvalidArgument,
                    HasSubstr("the options of ForEachFullParameter()"))));
}

// If one rank is already inside, the others are told and leave.
TEST(SummonFullParamsTest, WhatOneRankCannotEnterAllLeave) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    absl::Status refused;
    {
      std::optional<WholeInUse> in_use;
      if (world.rank() == 1) in_use.emplace(model->sharded_model());
      refused = model->SummonFullParams().status();
    }
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                            HasSubstr("a test"))));
}

}  // namespace
}  // namespace fsdp::testing
