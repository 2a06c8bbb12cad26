// The refusals of transparent units, and failures inside operators, whose
// callbacks' exceptions LibTorch swallows.
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <thread>

#include "base/testing/users_error.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

constexpr int kRanks = 2;

using Model = FullyShardedDataParallel<Mlp>;

// Makes every layer a transparent unit.
Options TransparentOptions() {
  Options options = GoOn(UnitsOf<torch::nn::LinearImpl>());
  options.transparent = true;
  return options;
}

absl::StatusOr<Model> ShardMlp(Communicator& world,
                               const Options& options = TransparentOptions()) {
  return FullyShard(std::make_shared<Mlp>(), Unowned(world), options);
}

// Checks that nothing is gathered, whatever has happened, and that a step has
// the loss and gradients of a model that has never failed.
absl::Status CheckStepIsExact(Model& model, Communicator& world) {
  EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0);
  model->module()->body = nullptr;
  FSDP_ASSIGN_OR_RETURN(Model fresh, ShardMlp(world));
  const at::Tensor x = Rows(world.rank(), 3, kDim);
  const at::Tensor loss = model->forward(x).square().mean();
  const at::Tensor expected = fresh->forward(x).square().mean();
  FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  FSDP_RETURN_IF_ERROR(fresh->Backward(expected));
  return CheckSameGradients(*model, *fresh);
}

// Does `act` twice with a model on each rank, which is as good as new each time
// after it.
void OnRanks(const std::function<absl::Status(Model&)>& act) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardMlp(world));
    for (int round = 0; round < 2; ++round) {
      FSDP_RETURN_IF_ERROR(act(model));
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, world));
    }
    return absl::OkStatus();
  }));
}

// Expects `act` to fail on all ranks with FailedPrecondition and `text`.
void ExpectRefused(const std::function<void()>& act, const std::string& text) {
  EXPECT_THAT(TorchToStatus("step", act),
              StatusIs(Code::kFailedPrecondition, HasSubstr(text)));
}

TEST(TransparentErrorsTest, AccessOutsideForwardRaisesTheStoragesText) {
  OnRanks([](Model& model) -> absl::Status {
    const auto check = [&] {
      ExpectRefused([&] { model.module()->second->weight.sum(); },
                    "the parameters of unit second are");
    };
    check();
    const at::Tensor loss = model->forward(Rows(0, 3, kDim)).sum();
    check();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    check();
    const c10::NoGradGuard no_grad;
    ExpectRefused([&] { model.module()->first->forward(Rows(0, 3, kDim)); },
                  "the parameters of unit first are");
    return absl::OkStatus();
  });
}

at::Tensor OnAnotherThread(const std::function<at::Tensor()>& run) {
  const at::ThreadLocalState state;
  at::Tensor result;
  absl::Status status;
  std::thread other([&] {
    const at::ThreadLocalStateGuard guard(state);
    status = TorchToStatus("other thread", [&] { result = run(); });
  });
  other.join();
  ThrowIfError(status);
  return result;
}

TEST(TransparentErrorsTest, AUnitThatIsToCastItsInputs) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    Options options = TransparentOptions();
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.cast_inputs = CastInputs::kEveryUnit;
    FSDP_ASSIGN_OR_RETURN(Model model, ShardMlp(world, options));
    ExpectRefused([&] { model->forward(Rows(0, 3, kDim)); },
                  "unit first is to cast its inputs");
    return absl::OkStatus();
  }));
}

// Takes its weight before any operator does, so that nobody can know of it.
class TakesWeight : public torch::autograd::Function<TakesWeight> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x});
    return x.matmul(weight);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    return {at::Tensor(),
            context->get_saved_variables()[0].t().matmul(gradients[0])};
  }
};

struct Misuse {
  Mlp::Body act;
  const char* text;
};

const Misuse kMisuses[] = {
    {[](Mlp& net, const at::Tensor& x) {
       const at::Tensor y = net.first->forward(x);
       {
         c10::NoGradGuard no_grad;
         net.first->weight.clamp_(-1, 1);
       }
       return net.second->forward(y);
     },
     "parameter first.weight was modified in place"},
    {[](Mlp& net, const at::Tensor&) { return net.first->weight.t(); },
     "an output is a parameter of unit first or a view of one"},
    // The parameter's unit may be gathered or not.
    {[](Mlp& net, const at::Tensor& x) {
       return OnAnotherThread([&] { return net.first->forward(x); });
     },
     "unit first on another thread"},
    {[](Mlp& net, const at::Tensor& x) {
       const at::Tensor y = net.first->forward(x);
       return OnAnotherThread([&] { return net.first->forward(y); });
     },
     "unit first on another thread"},
    // The model catches our error and goes on.
    {[](Mlp& net, const at::Tensor& x) {
       TorchToStatus("caught", [&] {
         OnAnotherThread([&] { return net.first->forward(x); });
       }).IgnoreError();
       return x * 2;
     },
     "unit first on another thread"},
    {[](Mlp& net, const at::Tensor& x) {
       return TakesWeight::apply(x, net.first->weight);
     },
     "a gradient reached parameter first.weight outside a forward"},
};

TEST(TransparentErrorsTest, MisuseInForwardFailsAlikeOnAllRanks) {
  for (const Misuse& misuse : kMisuses) {
    OnRanks([&](Model& model) {
      const auto step = [&] {
        ThrowIfError(model->Backward(model->forward(Rows(0, 3, kDim)).sum()));
      };
      model->module()->body = misuse.act;
      ExpectRefused(step, misuse.text);
      return absl::OkStatus();
    });
  }
}

TEST(TransparentErrorsTest, ACustomFunctionMayTakeAViewOfAParameter) {
  OnRanks([](Model& model) -> absl::Status {
    const auto act = [](Mlp& net, const at::Tensor& x) {
      return TakesWeight::apply(x, net.first->weight.view({kDim, kDim}));
    };
    const at::Tensor x = Rows(0, 3, kDim);
    model->module()->body = act;
    model->zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    Mlp plain;
    act(plain, x).sum().backward();
    const at::Tensor expected = plain.first->weight.grad().view({-1});
    const TensorRange& shard = model->Ranges()[0];
    return Check(at::allclose(shard.values.grad(), OwnPart(shard, expected)),
                 shard.name);
  });
}

// The gradient goes through a tensor that bypasses the root's output.
TEST(TransparentErrorsTest, CreateGraphOfAnInnerTensor) {
  OnRanks([](Model& model) -> absl::Status {
    at::Tensor inner;
    model->module()->body = [&inner](Mlp& net, const at::Tensor& x) {
      inner = net.second->forward(net.first->forward(x).tanh());
      return inner * 2;
    };
    model->forward(Rows(0, 3, kDim));
    ExpectRefused(
        [&] {
          inner.square().sum().backward({}, /*retain_graph=*/true,
                                        /*create_graph=*/true);
        },
        "create_graph=true");
    c10::NoGradGuard no_grad;
    model->module()->body = nullptr;
    model->forward(Rows(0, 3, kDim));
    return absl::OkStatus();
  });
}

TEST(TransparentErrorsTest, AutogradGradWithRespectToAParameter) {
  OnRanks([](Model& model) -> absl::Status {
    const at::Tensor x = Rows(0, 3, kDim).requires_grad_();
    const at::Tensor loss = model->forward(x).sum();
    ExpectRefused(
        [&] { torch::autograd::grad({loss}, {model.module()->first->weight}); },
        "a parameter of unit first");
    // The gradient with respect to the input equals that without sharding.
    const at::Tensor again = model->forward(x).sum();
    const at::Tensor gradient = torch::autograd::grad({again}, {x})[0];
    Mlp plain;
    const at::Tensor expected =
        torch::autograd::grad({plain.forward(x).sum()}, {x})[0];
    return CheckTensor(gradient, expected, 1e-5, 1e-8, "gradient of the input");
  });
}

// Called by the operator below between two reads of its input.
thread_local std::function<void()> between_reads;

at::Tensor ReadTwice(const at::Tensor& input) {
  const float* before = input.const_data_ptr<float>();
  between_reads();
  return at::scalar_tensor(before == input.const_data_ptr<float>());
}

TORCH_LIBRARY(fsdp_transparent_test, library) {
  library.def("read_twice(Tensor input) -> Tensor", ReadTwice);
}

TEST(TransparentErrorsTest, AnOperatorsInputsStayWhileItRunsOthers) {
  OnRanks([](Model& model) -> absl::Status {
    model->module()->body = [](Mlp& net, const at::Tensor& x) {
      between_reads = [&] {
        net.second->forward(x);
        net.third->forward(x);
      };
      static const auto read_twice =
          c10::Dispatcher::singleton()
              .findSchemaOrThrow("fsdp_transparent_test::read_twice", "")
              .typed<at::Tensor(const at::Tensor&)>();
      return read_twice.call(net.first->weight);
    };
    c10::NoGradGuard no_grad;
    return Check(model->forward(Rows(0, 3, kDim)).item<float>() == 1,
                 "the input has not stayed");
  });
}

TEST(TransparentErrorsTest, AnExceptionInBackwardLeavesAnotherBackwardExact) {
  OnRanks([](Model& model) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model fresh, ShardMlp(model->communicator()));
    model->zero_grad();
    const at::Tensor x = Rows(0, 3, kDim);
    const at::Tensor fails = model->forward(x).sum();
    at::Tensor other = model->forward(x);
    // This loss enters backward without the root's output.
    const at::Tensor loss = other.square().mean();
    const at::Tensor bad = fails * 2;
    fails.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw UsersError("hook"); });
    EXPECT_FALSE(TorchToStatus("b", [&] { bad.backward(); }).ok());
    FSDP_RETURN_IF_ERROR(TorchToStatus("b", [&] { loss.backward(); }));
    FSDP_RETURN_IF_ERROR(fresh->Backward(fresh->forward(x).square().mean()));
    return CheckSameGradients(*model, *fresh);
  });
}

TEST(TransparentErrorsTest, RanksThatRunDifferentUnits) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& world) -> absl::Status {
        Options options = TransparentOptions();
        options.abort_on_failure = true;
        FSDP_ASSIGN_OR_RETURN(Model model, ShardMlp(world, options));
        model->module()->body = [&](Mlp& net, const at::Tensor& x) {
          return world.rank() == 0 ? net.first->forward(x)
                                   : net.second->forward(x);
        };
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 3, kDim)); });
      });
  EXPECT_THAT(statuses, Each(StatusIs(Code::kInvalidArgument,
                                      AllOf(HasSubstr("all-gather of first"),
                                            HasSubstr("of second")))));
}

}  // namespace
}  // namespace fsdp::testing
