// Captures are refused by name: before the first step because of options or
// model, instead of the first replay because of steps, and instead of a replay
// because something has changed.
#include <torch/optim/adamw.h>

#include "base/testing/fake_device.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/capture/step_capture.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/captured_training.h"
#include "fsdp/testing/device_programs.h"

namespace fsdp::testing {
namespace {

template <typename... Texts>
auto Refused(const Texts&... texts) {
  return StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr(texts)...));
}

class StepCaptureRefusalsTest : public ::testing::Test {
 protected:
  using Step = CapturedStep::Step;
  using Inputs = CapturedStep::Inputs;

  static void SetUpTestSuite() { FakeDevice::Register(); }
  StepCaptureRefusalsTest() { FakeDevice::Reset(); }

  void Start(
      const std::function<void(Options&)>& configure = [](Options&) {},
      int world_size = 2, std::shared_ptr<Communicator> world = nullptr) {
    steps_ = 0;
    ASSERT_OK_AND_ASSIGN(training_, StartTraining(DeviceProgram(), world_size,
                                                  configure, std::move(world)));
  }
  absl::Status Make(const CaptureOptions& options = CapturedOnTheFakeDevice()) {
    FSDP_ASSIGN_OR_RETURN(
        step_, CapturedStep::Make(*training_->model, *training_->optimizer,
                                  training_->step, options));
    return absl::OkStatus();
  }
  // Returns a step that calls `read` with its loss before the backward.
  Step StepWith(const std::function<void(const at::Tensor&)>& read) {
    return [t = training_.get(),
            read](const Inputs& in) -> absl::StatusOr<at::Tensor> {
      at::Tensor loss = Loss(t->model->forward(in[0]), in[0]);
      read(loss);
      FSDP_RETURN_IF_ERROR(t->model->Backward(loss));
      t->optimizer->step();
      t->optimizer->zero_grad();
      return loss;
    };
  }
  absl::Status Run() {
    const int i = steps_++;
    return step_->Run({Training::Batch(i)}).status();
  }
  // Runs the warm-up and `replays` replays.
  void RunUpTo(int replays) {
    ASSERT_OK(Make());
    for (int i = 0; i < 3 + replays; ++i) ASSERT_OK(Run());
  }
  // Runs the steps of the warm-up, like RunEagerly().
  void WarmUp() {
    ASSERT_OK(Make());
    for (int i = 0; i < 3; ++i) {
      training_->SetRate(i);
      ASSERT_OK(Run());
    }
  }
  // Checks that eager steps train like those of a training without captures
  // that has made `done` steps.
  void ExpectToGoOn(int done) {
    ASSERT_OK_AND_ASSIGN(const auto other, StartTraining(DeviceProgram(), 2));
    for (int i = 0; i < done; ++i) ASSERT_OK(other->RunEagerly(i).status());
    for (int i = done; i < done + 2; ++i) {
      ASSERT_OK_AND_ASSIGN(const at::Tensor expected, other->RunEagerly(i));
      ASSERT_OK_AND_ASSIGN(const at::Tensor actual, training_->RunEagerly(i));
      EXPECT_TRUE(at::equal(actual.detach().cpu(), expected.detach().cpu()));
    }
  }

  std::unique_ptr<Training> training_;
  std::unique_ptr<CapturedStep> step_;
  int steps_ = 0;
};

TEST_F(StepCaptureRefusalsTest, AModelOnTheCpu) {
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Communicator> world,
                       comm::CreateLoopback({}));
  ASSERT_OK_AND_ASSIGN(
      auto model, FullyShard(MakeNet(Training::kDim, 1), world, BlockUnits()));
  FusedAdamW optimizer(model->Parameters());
  EXPECT_THAT(
      CapturedStep::Make(*model, optimizer, nullptr, CapturedOnTheFakeDevice())
          .status(),
      Refused("it is on cpu, which computes at once"));
}

TEST_F(StepCaptureRefusalsTest, WhatRestsElsewhere) {
  Start([](Options& options) { options.offload.optimizer = Tier::kCpu; });
  EXPECT_THAT(Make(), Refused("Options::offload is set"));
}

class HostGroup final : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  std::string ToString() const override { return "a host's group"; }
  bool CanBeCaptured() const override { return false; }
};

TEST_F(StepCaptureRefusalsTest, GroupsThatNeedTheHost) {
  ASSERT_OK_AND_ASSIGN(auto world, FakeDeviceWorld(2));
  Start([](Options&) {}, 2, std::make_shared<HostGroup>(world));
  EXPECT_THAT(Make(), Refused("the group (a host's group)", "Use NCCL"));
}

TEST_F(StepCaptureRefusalsTest, ReductionHooks) {
  Start();
  ASSERT_OK(
      training_->model->SetReductionHooks([](const ReduceScatterCall& call) {
        return call.group.ReduceScatter(call.own, call.whole,
                                        comm::ReduceOp::kSum, call.unit);
      }));
  EXPECT_THAT(Make(), Refused("SetReductionHooks()"));
}

TEST_F(StepCaptureRefusalsTest, RandomNumbersOfRecomputedUnits) {
  const auto recompute = [](bool preserve) {
    return [preserve](Options& options) {
      options.recompute.units = WrapModules<BlockImpl>();
      options.recompute.options.preserve_rng_state = preserve;
    };
  };
  Start(recompute(true));
  EXPECT_THAT(Make(), Refused("preserve_rng_state off"));
  Start(recompute(false));
  RunUpTo(2);
}

TEST_F(StepCaptureRefusalsTest, OptimizersThatCountOnTheHost) {
  Start();
  training_->optimizer =
      std::make_unique<torch::optim::AdamW>(training_->model->Parameters());
  EXPECT_THAT(Make(), Refused("Use FusedAdamW"));
}

TEST_F(StepCaptureRefusalsTest, OptionsWithoutAGraphOrAWarmUp) {
  Start();
  EXPECT_THAT(
      Make(CaptureOptions()),
      StatusIs(Code::kInvalidArgument, HasSubstr("make_graph, MakeCudaGraph")));
  CaptureOptions options = CapturedOnTheFakeDevice();
  options.warm_up_steps = 2;
  EXPECT_THAT(Make(options),
              StatusIs(Code::kInvalidArgument, HasSubstr("it is at least 3")));
}

// The model trains on after the refusal.
TEST_F(StepCaptureRefusalsTest, AStepThatReadsValues) {
  for (const bool before_the_step : {false, true}) {
    Start();
    const auto read = [](const at::Tensor& loss) { (void)loss.item<float>(); };
    training_->step =
        before_the_step
            ? StepWith(read)
            : Step([read, own = training_->step](
                       const Inputs& in) -> absl::StatusOr<at::Tensor> {
                FSDP_ASSIGN_OR_RETURN(at::Tensor loss, own(in));
                read(loss);
                return loss;
              });
    ASSERT_NO_FATAL_FAILURE(WarmUp());
    const absl::Status refused = Run();
    EXPECT_THAT(refused.message(), HasSubstr("the capture of a step: "));
    EXPECT_THAT(refused.message(), HasSubstr("_local_scalar_dense"));
    EXPECT_EQ(Run(), refused);
    ExpectToGoOn(3);
  }
}

TEST_F(StepCaptureRefusalsTest, AnErrorInBackward) {
  Start();
  training_->step =
      [t = training_.get(), own = training_->step,
       calls = 0](const Inputs& in) mutable -> absl::StatusOr<at::Tensor> {
    if (calls++ < 3) return own(in);
    at::Tensor out = t->model->forward(in[0]);
    out.register_hook([](const at::Tensor& gradient) {
      return gradient * gradient.sum().item<float>();
    });
    FSDP_RETURN_IF_ERROR(t->model->Backward(out.sum()));
    return out;
  };
  ASSERT_NO_FATAL_FAILURE(WarmUp());
  EXPECT_THAT(Run().message(), HasSubstr("_local_scalar_dense"));
  training_->step = StepWith([](const at::Tensor&) {});
  ExpectToGoOn(3);
}

TEST_F(StepCaptureRefusalsTest, StepsThatAreNotAlike) {
  Start();
  training_->step =
      [t = training_.get(), own = training_->step,
       calls = 0](const Inputs& in) mutable -> absl::StatusOr<at::Tensor> {
    if (calls++ % 2 == 0)
      FSDP_RETURN_IF_ERROR(
          t->model->Backward(Loss(t->model->forward(in[0]), in[0])));
    return own(in);
  };
  ASSERT_OK(Make());
  for (int i = 0; i < 3; ++i) ASSERT_OK(Run());
  EXPECT_THAT(Run(), Refused("steps are not alike"));
}

class PartlyUsedImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = used_(x) * table_;
    return uses_all ? unused_(y) : y;
  }

  bool uses_all = false;

 private:
  Linear used_ = register_module("used", Linear(6, 6));
  Linear unused_ = register_module("unused", Linear(6, 6));
  at::Tensor table_ = register_buffer("table", at::ones({6}));
};

// A training whose step is captured by Run().
struct PartlyUsed {
  explicit PartlyUsed(const Options& options)
      : model(ValueOrThrow(
            FullyShard(Moved(), ValueOrThrow(FakeDeviceWorld(2)), options))),
        optimizer(model->Parameters()) {}
  static std::shared_ptr<PartlyUsedImpl> Moved() {
    auto module = std::make_shared<PartlyUsedImpl>();
    FakeDevice::Move(module->parameters());
    FakeDevice::Move(module->buffers());
    return module;
  }
  absl::StatusOr<at::Tensor> Step(const at::Tensor& x) {
    at::Tensor loss = model->forward(x).sum();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  }
  absl::StatusOr<std::unique_ptr<CapturedStep>> Make() {
    return CapturedStep::Make(
        *model, optimizer, [this](const auto& in) { return Step(in[0]); },
        CapturedOnTheFakeDevice());
  }

  FullyShardedDataParallel<PartlyUsedImpl> model;
  FusedAdamW optimizer;
};

TEST_F(StepCaptureRefusalsTest, ParametersWithoutAGradientOnThisRank) {
  PartlyUsed training{Options()};
  ASSERT_OK_AND_ASSIGN(step_, training.Make());
  for (int i = 0; i < 3; ++i) ASSERT_OK(Run());
  EXPECT_THAT(Run(), Refused("WaitReduce of root: this rank has "
                             "no gradient of one of its"));
  step_.reset();
}

TEST_F(StepCaptureRefusalsTest, BuffersThatAnEvaluationHasMoved) {
  Options options;
  options.unit.precision.buffer_dtype = at::kBFloat16;
  options.unit.precision.full_precision_in_eval = true;
  PartlyUsed training(options);
  training.model.module()->uses_all = true;
  ASSERT_OK_AND_ASSIGN(step_, training.Make());
  for (int i = 0; i < 4; ++i) ASSERT_OK(Run());
  at::Tensor x = Training::Batch(0);
  FakeDevice::Move({x});
  training.model->eval();
  {
    const c10::NoGradGuard no_grad;
    training.model->forward(x);
  }
  training.model->train();
  EXPECT_THAT(Run(), Refused("a buffer lies elsewhere"));
  step_.reset();
}

TEST_F(StepCaptureRefusalsTest, GradientsThatStayWhereNoneWere) {
  Start();
  training_->step = [t = training_.get(), own = training_->step](
                        const Inputs& in) -> absl::StatusOr<at::Tensor> {
    at::Tensor loss = Loss(t->model->forward(in[0]), in[0]);
    t->optimizer->zero_grad();
    FSDP_RETURN_IF_ERROR(t->model->Backward(loss));
    t->optimizer->step();
    return loss;
  };
  // From the second step on, gradients exist at both ends of a step.
  RunUpTo(2);
  training_->optimizer->zero_grad();
  EXPECT_THAT(Run(), Refused("is gone, which was there"));
}

TEST_F(StepCaptureRefusalsTest, GradientsOfAnotherBackward) {
  Start();
  RunUpTo(1);
  const at::Tensor x = Training::Batch(0);
  ASSERT_OK(training_->model->Backward(Loss(training_->model->forward(x), x)));
  EXPECT_THAT(Run(), Refused("is there, which was not when"));
  training_->optimizer->zero_grad();
  EXPECT_OK(Run());
}

TEST_F(StepCaptureRefusalsTest, GradientsKeptByNoSync) {
  Start();
  RunUpTo(1);
  {
    const auto no_sync = training_->model->NoSync();
    const at::Tensor x = Training::Batch(0);
    ASSERT_OK(
        training_->model->Backward(Loss(training_->model->forward(x), x)));
  }
  EXPECT_THAT(Run(), Refused("that NoSync()"));
  training_->model->zero_grad();
  EXPECT_OK(Run());
}

// The call with 0 replays would capture the step.
TEST_F(StepCaptureRefusalsTest, InputsOfAnotherSize) {
  for (const int replays : {0, 1}) {
    Start();
    RunUpTo(replays);
    EXPECT_THAT(step_->Run({Training::Batch(0).narrow(0, 0, 2)}).status(),
                StatusIs(Code::kInvalidArgument,
                         HasSubstr("input 0 of a captured step is [2, 6]")));
    EXPECT_THAT(step_->Run({}).status(),
                StatusIs(Code::kInvalidArgument, HasSubstr("gets 0 inputs")));
    EXPECT_THAT(step_->Run({at::eye(6).to_sparse()}).status(),
                StatusIs(Code::kInvalidArgument, HasSubstr("is sparse")));
    EXPECT_OK(Run());
    EXPECT_EQ(step_->replays(), replays + 1);
  }
}

TEST_F(StepCaptureRefusalsTest, InputsWhereTheFirstCallHadNone) {
  Start();
  training_->step = [own = training_->step](const Inputs& /*none*/) {
    return own({Training::Batch(0)});
  };
  ASSERT_OK(Make());
  for (int i = 0; i < 3; ++i) ASSERT_OK(step_->Run({}).status());
  EXPECT_THAT(Run(),
              StatusIs(Code::kInvalidArgument, HasSubstr("gets 1 inputs")));
}

TEST_F(StepCaptureRefusalsTest, ParametersThatAreFrozenOrNoMore) {
  for (const bool trainable : {false, true}) {
    Start();
    const std::string name = training_->model->Ranges().back().name;
    ASSERT_OK(training_->model->SetTrainable(name, !trainable));
    RunUpTo(1);
    ASSERT_OK(training_->model->SetTrainable(name, trainable));
    const at::Tensor& shard = training_->model->Ranges().back().values;
    const at::Tensor before = shard.detach().cpu().clone();
    EXPECT_THAT(Run(),
                Refused(name + (trainable ? " is trainable" : " is frozen")));
    EXPECT_TRUE(at::equal(shard.detach().cpu(), before));
    ASSERT_OK(training_->model->SetTrainable(name, !trainable));
    EXPECT_OK(Run());
  }
}

TEST_F(StepCaptureRefusalsTest, ReductionsThatChange) {
  Start();
  RunUpTo(1);
  auto& model = training_->model;
  const auto other = Refused("says something else than when a step was");
  {
    const auto no_sync = model->NoSync();
    EXPECT_THAT(Run(), other);
  }
  ASSERT_OK(SetRequiresGradientSync(*model->module(), false));
  EXPECT_THAT(Run(), other);
  ASSERT_OK(SetRequiresGradientSync(*model->module(), true));
  EXPECT_OK(Run());
  ASSERT_OK(model->SetGradientDivideFactors(1, 4));
  EXPECT_THAT(Run(), other);
  step_->Recapture();
  for (int i = 0; i < 5; ++i) ASSERT_OK(Run());
  ASSERT_OK(model->SetReductionHooks([](const ReduceScatterCall& call) {
    return call.group.ReduceScatter(call.own, call.whole, comm::ReduceOp::kSum,
                                    call.unit);
  }));
  EXPECT_THAT(Run(), Refused("SetReductionHooks()"));
}

TEST_F(StepCaptureRefusalsTest, AnOptimizerThatWasCapturedAgain) {
  Start();
  RunUpTo(1);
  const std::unique_ptr<CapturedStep> first = std::move(step_);
  RunUpTo(1);
  EXPECT_THAT(first->Run({Training::Batch(0)}).status(),
              Refused("captured again since, by another"));
  EXPECT_OK(Run());
}

TEST_F(StepCaptureRefusalsTest, OptionsThatChange) {
  Start();
  RunUpTo(1);
  auto& options = static_cast<torch::optim::AdamWOptions&>(
      training_->optimizer->param_groups()[0].options());
  options.weight_decay(0.5);
  EXPECT_THAT(Run(), Refused("only its learning rate may", "Recapture()"));
  step_->Recapture();
  for (int i = 0; i < 5; ++i) ASSERT_OK(Run());
  EXPECT_EQ(step_->replays(), 1 + 2);
}

}  // namespace
}  // namespace fsdp::testing
