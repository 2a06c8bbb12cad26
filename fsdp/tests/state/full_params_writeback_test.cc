// Which writes of ranks to whole parameters are kept, and that tensors that are
// handed out end with their scope.
#include <ATen/ops/ones_like.h>

#include <stdexcept>

#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing::toy {
namespace {

struct WriteCase {
  const char* name;
  bool writeback;
  bool rank0_only;
  ShardingStrategy strategy;
  bool persists;
  bool offload_to_cpu = false;
};

class WritebackTest : public ::testing::TestWithParam<WriteCase> {};

// Rank r adds r + 1 to everything, in place or by other data.
TEST_P(WritebackTest, KeepsWhatItPromises) {
  const WriteCase& c = GetParam();
  EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
    Options options = BlockUnits();
    options.unit.strategy = c.strategy;
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(MakeNet(kDim, kBlocks), mesh, options));
    SummonOptions summon;
    summon.writeback = c.writeback;
    summon.rank0_only = c.rank0_only;
    summon.offload_to_cpu = c.offload_to_cpu;
    {
      FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams(summon));
      const bool has_values = !c.rank0_only || world.rank() == 0;
      c10::NoGradGuard no_grad;
      bool in_place = false;
      for (at::Tensor& p : model.module()->parameters()) {
        FSDP_RETURN_IF_ERROR(Check(IsFreed(p) != has_values, "values"));
        if (!has_values) continue;
        in_place = !in_place;
        const at::Tensor sum = p + (world.rank() + 1);
        in_place ? void(p.copy_(sum)) : p.set_data(sum);
      }
      FSDP_RETURN_IF_ERROR(full.Close());
    }
    const auto expected = MakeNet(kDim, kBlocks);
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) -> absl::Status {
          const at::Tensor added =
              value - *expected->named_parameters().find(name);
          if (!c.persists)
            return Check(added.abs().max().item<float>() < 1e-6,
                         name + " was written");
          if (c.rank0_only) {
            return Check(at::allclose(added, at::ones_like(added), 1e-4, 1e-5),
                         name + " is not rank 0's");
          }
          // Every element has the value that one rank of the group has written.
          EXPECT_TRUE(added.min().item<float>() > 0.99) << name + " was lost";
          return absl::OkStatus();
        });
  }));
}

using S = ShardingStrategy;

INSTANTIATE_TEST_SUITE_P(
    All, WritebackTest,
    ::testing::Values(
        WriteCase{"OwnRange", true, false, S::kFullShard, true},
        WriteCase{"Volatile", false, false, S::kFullShard, false},
        WriteCase{"OfRank0", true, true, S::kFullShard, true},
        WriteCase{"VolatileOfRank0", false, true, S::kFullShard, false},
        WriteCase{"Hybrid", true, false, S::kHybridShard, true},
        WriteCase{"HybridOfRank0", true, true, S::kHybridShard, true},
        WriteCase{"NotSharded", true, false, S::kNoShard, true},
        WriteCase{"NotShardedOffloaded", true, false, S::kNoShard, true, true},
        // What is not sharded is written in place.
        WriteCase{"VolatileNotSharded", false, false, S::kNoShard, true}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(SummonFullParamsTest, ReplicasStayEqualWhateverEachWrites) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.strategy = ShardingStrategy::kNoShard;
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) {
        p.fill_(world.rank() + 1);
      }
    }
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          return Check((value == 1).all().item<bool>(), name);
        });
  }));
}

TEST(SummonFullParamsTest, AnExceptionInTheScopeStillWritesBackAndFrees) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    try {
      FullParamsScope full = ValueOrThrow(model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) p.fill_(3);
      throw std::runtime_error("in the scope");
    } catch (const std::runtime_error&) {
    }
    FSDP_RETURN_IF_ERROR(CheckAllFreed(*model.module()));
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          return Check((value == 3).all().item<bool>(), name);
        }));
    return Backward(model);
  }));
}

TEST(SummonFullParamsTest, WhatReplacesAParameterHasItsSizes) {
  EXPECT_THAT(comm::testing::RunRefusedRanks(
                  2,
                  [](Communicator& world) -> absl::Status {
                    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
                    FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams());
                    model.module()->head->bias.set_data(at::ones({kDim + 1}));
                    return full.Close();
                  }),
              Each(StatusIs(Code::kInvalidArgument,
                            HasSubstr("what replaces head.bias"))));
}

absl::Status CheckIsOver(const std::vector<at::Tensor>& tensors,
                         const std::string& what) {
  for (const at::Tensor& tensor : tensors) {
    EXPECT_THAT(TorchToStatus("read", [&] { tensor.clone(); }),
                StatusIs(Code::kFailedPrecondition, HasSubstr(what)));
  }
  return absl::OkStatus();
}

TEST(HandedOutTest, ViewsOfSummonedParametersAndGradientsEndWithTheScope) {
  for (const bool offload : {false, true}) {
    EXPECT_OK(OnRanks(2, [&](Model& model) -> absl::Status {
      FSDP_RETURN_IF_ERROR(Backward(model));
      SummonOptions summon;
      summon.with_grads = true;
      summon.offload_to_cpu = offload;
      std::vector<at::Tensor> views;
      at::Tensor copy;
      {
        FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams(summon));
        at::Tensor& weight = model.module()->head->weight;
        views = {weight.t(), weight.detach(), weight.select(0, 1),
                 weight.data(), weight.grad().select(0, 1)};
        copy = weight.detach().clone();
        FSDP_RETURN_IF_ERROR(Check(at::equal(views[1], copy), "in the scope"));
      }
      FSDP_RETURN_IF_ERROR(
          CheckIsOver(views, "the scope of SummonFullParams() is over"));
      // Graphs that hold these tensors do not disturb, and get nothing.
      FSDP_RETURN_IF_ERROR(Backward(model));
      FSDP_RETURN_IF_ERROR(
          CheckIsOver(views, "the scope of SummonFullParams() is over"));
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      return Check(at::equal(dict["head.weight"], copy), "the copy");
    }));
  }
}

TEST(HandedOutTest, WhatAVisitorKeepsEndsWithItsCall) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    std::vector<at::Tensor> kept;
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string&, const at::Tensor& value) {
          kept.push_back(value);
          return Check(value.abs().sum().item<float>() > 0, "no values");
        }));
    return CheckIsOver(kept, "the visit of ForEachFullParameter() is over");
  }));
}

TEST(HandedOutTest, RebuiltFlatParametersEndWithTheirGather) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto rebuilt, model->RebuildFullParams());
    std::vector<at::Tensor> flats;
    for (const RebuiltParameter& each : rebuilt) {
      EXPECT_TRUE(each.flat.abs().sum().item<float>() > 0) << "no values";
      flats.push_back(each.flat);
    }
    FSDP_RETURN_IF_ERROR(Backward(model));
    return CheckIsOver(flats, "are sharded");
  }));
}

}  // namespace
}  // namespace fsdp::testing::toy
