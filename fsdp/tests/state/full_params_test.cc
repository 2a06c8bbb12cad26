#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/model/sharded_model.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing::toy {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;

TEST(SummonFullParamsTest, ShowsWholeLeavesUnderTheirOwnNamesThenNothing) {
  for (const int world_size : {1, 2, 3, 5}) {
    EXPECT_OK(OnRanks(world_size, [](Model& model) -> absl::Status {
      {
        FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
        FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
        for (const at::Tensor& p : model.module()->parameters()) {
          EXPECT_TRUE(p.is_leaf() && p.requires_grad()) << "not a leaf";
        }
      }
      FSDP_RETURN_IF_ERROR(CheckAllFreed(*model.module()));
      return Check(model->memory_stats().parameters.in_use_bytes == 0, "left");
    }));
  }
}

TEST(SummonFullParamsTest, IsInFullPrecisionWhateverIsComputedIn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.strategy = ShardingStrategy::kShardGradOp;
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor before = model->forward(x);
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) p.mul_(2);
    }
    const at::Tensor after = model->forward(x);
    // The low-precision copy from before, which was kept for a backward, must
    // not be used.
    return Check(
        after.scalar_type() == at::kBFloat16 && !at::allclose(before, after),
        "the low-precision copy is stale");
  }));
}

TEST(SummonFullParamsTest, OfAModuleInsideShowsItsUnitsOnly) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    torch::nn::Module& block = *model.module()->blocks[0];
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, SummonFullParams(block));
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(block.parameters().front()), "freed"));
    return CheckAllFreed(*model.module()->blocks[1]);
  }));
}

TEST(SummonFullParamsTest, WithoutRecursionShowsWhatTheUnitOwns) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    SummonOptions options;
    options.recurse = false;
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                          SummonFullParams(*model.module(), options));
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(model.module()->head->weight), "head"));
    return CheckAllFreed(*model.module()->blocks);
  }));
}

TEST(SummonFullParamsTest, WithoutAnythingShardedDoesNothing) {
  Linear plain(kDim, kDim);
  ASSERT_OK_AND_ASSIGN(FullParamsScope full, SummonFullParams(*plain));
  EXPECT_OK(full.Close());
}

TEST(SummonFullParamsTest, AssigningAScopeClosesTheOneBefore) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model first, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(Model second, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(FullParamsScope a, first->SummonFullParams());
    FSDP_ASSIGN_OR_RETURN(FullParamsScope b, second->SummonFullParams());
    a = std::move(b);
    FullParamsScope& itself = a;
    a = std::move(itself);
    FSDP_RETURN_IF_ERROR(CheckAllFreed(*first.module()));
    return CheckInitialValues(*second.module());
  }));
}

// A plain module may contain several sharded models, and others.
TEST(SummonFullParamsTest, TakesSeveralRootsAtOnceAndLeavesPlainModulesAlone) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model first, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(Model second, MakeModel(world));
    Linear plain(kDim, kDim);
    const at::Tensor before = plain->weight.detach().clone();
    const void* const memory = plain->weight.data_ptr();
    torch::nn::ModuleList all(first.ptr(), plain.ptr(), second.ptr());
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, SummonFullParams(*all));
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*first.module()));
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*second.module()));
    }
    EXPECT_TRUE(plain->weight.data_ptr() == memory && plain->weight.is_leaf() &&
                at::equal(plain->weight, before));
    FSDP_RETURN_IF_ERROR(CheckAllFreed(*first.module()));
    return CheckAllFreed(*second.module());
  }));
}

absl::Status CheckSummonedGradients(Communicator& world, bool offload,
                                    bool rank0_only) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
  FSDP_RETURN_IF_ERROR(model->SetTrainable("head.bias", false));
  FSDP_RETURN_IF_ERROR(Backward(model));
  const auto plain = MakeNet(kDim, kBlocks);
  const int world_size = world.world_size();
  for (int rank = 0; rank < world_size; ++rank) {
    const at::Tensor x = Rows(rank, 3, kDim);
    (Loss(plain->forward(x), x) / world_size).backward();
  }
  SummonOptions options;
  options.with_grads = true;
  options.offload_to_cpu = offload;
  options.rank0_only = rank0_only;
  {
    FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams(options));
    for (const auto& item : model.module()->named_parameters()) {
      at::Tensor gradient = item.value().grad();
      const bool has_gradient =
          (!rank0_only || world.rank() == 0) && item.key() != "head.bias";
      EXPECT_TRUE(gradient.defined() == has_gradient) << item.key();
      if (!has_gradient) continue;
      EXPECT_TRUE(at::allclose(
          gradient, plain->named_parameters().find(item.key())->grad(), 1e-4,
          1e-6))
          << "gradient of " + item.key();
      if (item.key() == "head.weight") {
        item.value().mutable_grad() = at::full_like(gradient, 2);
      } else if (item.key() == "blocks.0.lin.weight") {
        item.value().mutable_grad().reset();
      } else {
        gradient.fill_(2);
      }
    }
    FSDP_RETURN_IF_ERROR(full.Close());
  }
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    const bool is_frozen = named.name == "head.bias";
    EXPECT_EQ(gradient.defined(), !is_frozen) << named.name;
    const double written = named.name == "blocks.0.lin.weight" ? 0 : 2;
    EXPECT_TRUE(is_frozen || (gradient == written).all().item<bool>())
        << "gradients are not written back: " << named.name;
  }
  return absl::OkStatus();
}

TEST(SummonFullParamsTest, GradientsAreSeenAndWrittenBackAlsoOffloaded) {
  for (const bool offload : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      EXPECT_OK(RunAllRanks(3, [&](Communicator& world) {
        return CheckSummonedGradients(world, offload, rank0_only);
      }));
    }
  }
}

TEST(SummonFullParamsTest, ParametersMayBecomeViewsOfOneAnother) {
  EXPECT_OK(OnRanks(3, [](Model& model) -> absl::Status {
    const auto plain = MakeNet(kDim, kBlocks);
    std::map<std::string, at::Tensor> expected;
    for (const auto& item : plain->named_parameters()) {
      expected[item.key()] = item.value().detach().clone();
    }
    at::Tensor& a = model.module()->embed->weight;
    at::Tensor& b = model.module()->head->weight;
    const c10::NoGradGuard no_grad;
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      a.set_data(a.detach().t());
    }
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      const at::Tensor was = a.detach();
      a.set_data(b.detach());
      b.set_data(was.t());
      FSDP_RETURN_IF_ERROR(full.Close());
    }
    std::swap(expected["embed.weight"], expected["head.weight"]);
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          return Check(at::equal(value, expected.at(name)), name);
        });
  }));
}

TEST(SummonFullParamsTest,
     AnotherSizeOnOneRankIsRefusedByAllWithNothingWritten) {
  for (const bool writeback : {true, false}) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      SummonOptions options;
      options.writeback = writeback;
      FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams(options));
      {
        const c10::NoGradGuard no_grad;
        for (at::Tensor& p : model.module()->parameters()) p.zero_();
        if (world.rank() == 1) {
          model.module()->head->bias.set_data(at::zeros({kDim + 1}));
        }
      }
      if (writeback) {
        EXPECT_THAT(full.Close(),
                    StatusIs(Code::kInvalidArgument,
                             HasSubstr("rank 1: what replaces head.bias")));
      } else {
        EXPECT_OK(full.Close());
      }
      FSDP_ASSIGN_OR_RETURN(full, model->SummonFullParams());
      return CheckInitialValues(*model.module());
    }));
  }
}

TEST(ForEachFullParameterTest, EditsAreKeptWithWritebackOnly) {
  for (const bool writeback : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      EXPECT_OK(OnRanks(3, [&](Model& model) -> absl::Status {
        int visited = 0;
        FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
            [&](const std::string&, const at::Tensor& value) {
              ++visited;
              value.fill_(4);
              return absl::OkStatus();
            },
            VisitOptions{writeback, rank0_only}));
        const int expected =
            rank0_only && model->communicator().rank() != 0 ? 0 : 12;
        FSDP_RETURN_IF_ERROR(Check(visited == expected, "visits"));
        return model->ForEachFullParameter(
            [&](const std::string& name, const at::Tensor& value) {
              return Check((value == 4).all().item<bool>() == writeback, name);
            });
      }));
    }
  }
}

class SummonsInForward : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    refused = SummonFullParams(*linear).status();
    if (refused.ok()) refused = SummonFullParams(*this).status();
    return linear->forward(x);
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  absl::Status refused;
};

TEST(SummonFullParamsTest, IsRefusedInsideAForwardWhichGoesOn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<SummonsInForward>();
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    const at::Tensor y = model->forward(Rows(0, 2, kDim));
    EXPECT_TRUE(absl::IsFailedPrecondition(net->refused) &&
                absl::StrContains(net->refused.message(), "inside a forward"))
        << net->refused.ToString();
    return model->Backward(y.sum());
  }));
}

TEST(SummonFullParamsTest, IsRefusedInsideABackwardWhichGoesOn) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    at::Tensor x = Rows(0, 2, kDim);
    at::Tensor y = model->forward(x);
    absl::Status refused;
    y.register_hook([&](const at::Tensor& gradient) {
      refused = model->SummonFullParams().status();
      return gradient;
    });
    FSDP_RETURN_IF_ERROR(model->Backward(y.sum()));
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused.ToString();
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
      [](Model& model) { return model->GatherStateDict().status(); },
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
                AllRefuse("whole for SummonFullParams()"))
        << "misuse " << i;
  }
}

TEST(SummonFullParamsTest, ABackwardOfAnEarlierGraphIsRefusedInsideIt) {
  EXPECT_OK(OnRanks(2, [](Model& model) -> absl::Status {
    const at::Tensor loss = model->forward(Rows(0, 2, kDim)).sum();
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
    return Check(absl::IsFailedPrecondition(model->Backward(loss)), "allowed");
  }));
}

TEST(SummonFullParamsTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  for (const bool visits : {false, true}) {
    const auto run = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      SummonOptions summon;
      summon.writeback = world.rank() == 0;
      VisitOptions visit;
      visit.rank0_only = world.rank() == 0;
      absl::Status refused =
          visits ? model->ForEachFullParameter(
                       [](auto&, auto&) { return absl::OkStatus(); }, visit)
                 : model->SummonFullParams(summon).status();
      FSDP_RETURN_IF_ERROR(Backward(model));
      return refused;
    };
    EXPECT_THAT(RunRefusedRanks(3, run),
                AllRefuse(visits ? "the options of ForEachFullParameter()"
                                 : "the options of SummonFullParams()",
                          Code::kInvalidArgument));
  }
}

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
  EXPECT_THAT(RunRefusedRanks(3, run), AllRefuse("my disk", Code::kInternal));
}

// If one rank is already inside, the others are told and leave.
TEST(SummonFullParamsTest, WhatOneRankCannotEnterAllLeave) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    ShardedModel& sharded = model->sharded_model();
    const bool is_inside = world.rank() == 1;
    if (is_inside) FSDP_RETURN_IF_ERROR(sharded.BeginWholeAccess("a test"));
    absl::Status refused = model->SummonFullParams().status();
    if (is_inside) sharded.EndWholeAccess();
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run), AllRefuse("a test"));
}

// --- Units gathered ahead of use ---------------------------------------------

TEST(UnshardTest, TheNextForwardFindsTheUnitAndFreesIt) {
  RecordedRanks ranks(2);
  const auto run = [&](Communicator& world) -> absl::Status {
    CollectiveLog& log = ranks.logs[world.rank()];
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    c10::NoGradGuard no_grad;
    const auto gathers = [&] {
      return log.TotalsOf(Collective::kAllGather, "blocks.1").count;
    };
    log.Clear();
    torch::nn::Module& block = *model.module()->blocks[1];
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(block));
    FSDP_RETURN_IF_ERROR(Unshard(block).status());  // once is enough
    FSDP_RETURN_IF_ERROR(handle.Wait());
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(block.parameters().front()), "freed"));
    model->forward(Rows(0, 1, kDim));
    FSDP_RETURN_IF_ERROR(Check(gathers() == 1, "gathered again"));
    FSDP_RETURN_IF_ERROR(CheckAllFreed(block));
    FSDP_RETURN_IF_ERROR(Unshard(block).status());
    FSDP_RETURN_IF_ERROR(Reshard(block));
    FSDP_RETURN_IF_ERROR(CheckAllFreed(block));
    return Check(model->memory_stats().parameters.in_use_bytes == 0, "left");
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

TEST(UnshardTest, IsForUnits) {
  Linear plain(kDim, kDim);
  EXPECT_THAT(Unshard(*plain).status(),
              StatusIs(Code::kFailedPrecondition,
                       HasSubstr("no unit of a sharded model")));
  EXPECT_THAT(Reshard(*plain),
              StatusIs(Code::kFailedPrecondition, HasSubstr("no unit")));
}

TEST(RebuildFullParamsTest, IsIdempotentAndTellsWhatMayBeFreed) {
  for (const int world_size : {1, 3}) {
    RecordedRanks ranks(world_size);
    const auto run = [&](Communicator& world) -> absl::Status {
      CollectiveLog& log = ranks.logs[world.rank()];
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      log.Clear();
      FSDP_ASSIGN_OR_RETURN(auto rebuilt, model->RebuildFullParams());
      FSDP_ASSIGN_OR_RETURN(auto again, model->RebuildFullParams());
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      const int units = kBlocks + 1;
      FSDP_RETURN_IF_ERROR(Check(rebuilt.size() == units, "list"));
      for (size_t i = 0; i < rebuilt.size(); ++i) {
        EXPECT_TRUE(rebuilt[i].safe_to_free == (world_size > 1))
            << "safe_to_free";
        EXPECT_TRUE(rebuilt[i].flat.data_ptr() == again[i].flat.data_ptr())
            << "moved";
        EXPECT_TRUE(rebuilt[i].flat.numel() % world_size == 0) << "padding";
      }
      const int64_t gathers = log.TotalsOf(Collective::kAllGather).count;
      EXPECT_TRUE(gathers == (world_size > 1 ? units : 0)) << "gathered twice";
      FSDP_RETURN_IF_ERROR(Backward(model));
      return CheckAllFreed(*model.module());
    };
    EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
  }
}

}  // namespace
}  // namespace fsdp::testing::toy
