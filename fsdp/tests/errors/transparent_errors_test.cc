// The refusals of transparent units, and failures inside operators, whose
// callbacks' exceptions LibTorch swallows.
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <thread>

#include "base/testing/users_error.h"
#include "comm/testing/failing_communicator.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

// Does what `act` says; without one, computes like a plain model of three
// layers.
class Acting : public torch::nn::Module {
 public:
  using Act = std::function<at::Tensor(Acting& net, const at::Tensor& x)>;
  Acting()
      : first(register_module("first", Linear(kDim, kDim))),
        second(register_module("second", Linear(kDim, kDim))),
        third(register_module("third", Linear(kDim, kDim))) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (act) return act(*this, x);
    return third->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, second, third;
  Act act;
};

using Model = FullyShardedDataParallel<Acting>;

// Makes every layer a transparent unit.
Options TransparentOptions() {
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
  options.abort_on_failure = false;
  return options;
}

absl::StatusOr<Model> ShardActing(
    Communicator& communicator, const Options& options = TransparentOptions()) {
  return FullyShard(std::make_shared<Acting>(), Unowned(communicator), options);
}

// Checks that nothing is gathered, whatever has happened, and that a step has
// the loss and gradients of a model that has never failed.
absl::Status CheckStepIsExact(Model& model, Communicator& communicator) {
  FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().parameters.in_use_bytes,
                                 Eq(0), "bytes of parameters"));
  model->module()->act = nullptr;
  FSDP_ASSIGN_OR_RETURN(Model fresh, ShardActing(communicator));
  const at::Tensor x = Rows(communicator.rank(), 3, kDim);
  const at::Tensor loss = model->forward(x).square().mean();
  const at::Tensor expected = fresh->forward(x).square().mean();
  FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  FSDP_RETURN_IF_ERROR(fresh->Backward(expected));
  return CheckSameGradients(*model, *fresh);
}

// Returns an error if `status` has another code or text.
absl::Status Expect(const absl::Status& status, Code code,
                    const std::string& text) {
  return CheckThat(status, StatusIs(code, HasSubstr(text)), "refusal");
}

// Expects `act` to fail alike on all ranks, in the model's forward or its
// backward, and the model to be as good as new afterwards.
void ExpectFails(const Acting::Act& act, Code code, const std::string& text) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    for (int round = 0; round < 2; ++round) {
      model->module()->act = act;
      const absl::Status status = TorchToStatus("step", [&] {
        ThrowIfError(model->Backward(model->forward(Rows(0, 3, kDim)).sum()));
      });
      FSDP_RETURN_IF_ERROR(Expect(status, code, text));
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
}

// --- Access outside forward --------------------------------------------------

TEST(TransparentErrorsTest, AccessOutsideForwardRaisesTheStoragesText) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    const auto check = [&] {
      return Expect(
          TorchToStatus("sum", [&] { model.module()->second->weight.sum(); }),
          Code::kFailedPrecondition, "the parameters of unit second are");
    };
    FSDP_RETURN_IF_ERROR(check());
    const at::Tensor loss = model->forward(Rows(0, 3, kDim)).sum();
    FSDP_RETURN_IF_ERROR(check());
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_RETURN_IF_ERROR(check());
    return CheckStepIsExact(model, communicator);
  }));
}

TEST(TransparentErrorsTest, AChildsForwardOutsideTheRoots) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    FSDP_RETURN_IF_ERROR(
        Expect(TorchToStatus("forward",
                             [&] {
                               c10::NoGradGuard no_grad;
                               model.module()->first->forward(Rows(0, 3, kDim));
                             }),
               Code::kFailedPrecondition, "the parameters of unit first are"));
    return CheckStepIsExact(model, communicator);
  }));
}

// --- Misuse in forward -------------------------------------------------------

TEST(TransparentErrorsTest, AParameterModifiedInPlace) {
  ExpectFails(
      [](Acting& net, const at::Tensor& x) {
        const at::Tensor y = net.first->forward(x);
        {
          c10::NoGradGuard no_grad;
          net.first->weight.clamp_(-1, 1);
        }
        return net.second->forward(y);
      },
      Code::kFailedPrecondition,
      "parameter first.weight was modified in place");
}

TEST(TransparentErrorsTest, AnOutputOfTheRootThatIsAParameter) {
  ExpectFails(
      [](Acting& net, const at::Tensor&) { return net.first->weight.t(); },
      Code::kFailedPrecondition,
      "an output is a parameter of unit first or a view of one");
}

TEST(TransparentErrorsTest, AModuleConvertedAfterSharding) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    model.module()->second->weight.set_data(at::ones({kDim, kDim}));
    c10::NoGradGuard no_grad;
    return Expect(
        TorchToStatus("forward", [&] { model->forward(Rows(0, 3, kDim)); }),
        Code::kFailedPrecondition,
        "parameter second.weight no longer looks into");
  }));
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

TEST(TransparentErrorsTest, OperatorsOnAnotherThread) {
  // The parameter's unit may be gathered or not.
  ExpectFails(
      [](Acting& net, const at::Tensor& x) {
        return OnAnotherThread([&] { return net.first->forward(x); });
      },
      Code::kFailedPrecondition, "unit first on another thread");
  ExpectFails(
      [](Acting& net, const at::Tensor& x) {
        const at::Tensor y = net.first->forward(x);
        return OnAnotherThread([&] { return net.first->forward(y); });
      },
      Code::kFailedPrecondition, "unit first on another thread");
}

// The model catches our error and goes on.
TEST(TransparentErrorsTest, AnErrorThatTheModelCatches) {
  ExpectFails(
      [](Acting& net, const at::Tensor& x) {
        TorchToStatus("caught", [&] {
          OnAnotherThread([&] { return net.first->forward(x); });
        }).IgnoreError();
        return x * 2;
      },
      Code::kFailedPrecondition, "unit first on another thread");
}

TEST(TransparentErrorsTest, AUnitThatIsToCastItsInputs) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    Options options = TransparentOptions();
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.cast_inputs = CastInputs::kEveryUnit;
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator, options));
    return Expect(
        TorchToStatus("forward", [&] { model->forward(Rows(0, 3, kDim)); }),
        Code::kFailedPrecondition, "unit first is to cast its inputs");
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

TEST(TransparentErrorsTest, ACustomFunctionThatIsTheFirstToTakeAParameter) {
  ExpectFails(
      [](Acting& net, const at::Tensor& x) {
        return TakesWeight::apply(x, net.first->weight);
      },
      Code::kFailedPrecondition,
      "a gradient reached parameter first.weight outside a forward");
}

TEST(TransparentErrorsTest, ACustomFunctionMayTakeAViewOfAParameter) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    const auto act = [](Acting& net, const at::Tensor& x) {
      return TakesWeight::apply(x, net.first->weight.view({kDim, kDim}));
    };
    const at::Tensor x = Rows(0, 3, kDim);
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    model->module()->act = act;
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    Acting plain;
    act(plain, x).sum().backward();
    const at::Tensor expected = plain.first->weight.grad().view({-1});
    const TensorRange& shard = model->Ranges()[0];
    FSDP_RETURN_IF_ERROR(
        Check(at::allclose(shard.values.grad(), OwnPart(shard, expected)),
              shard.name));
    return CheckStepIsExact(model, communicator);
  }));
}

// --- Autograd ----------------------------------------------------------------

// The gradient goes through a tensor that bypasses the root's output.
TEST(TransparentErrorsTest, CreateGraphOfAnInnerTensor) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    at::Tensor inner;
    model->module()->act = [&inner](Acting& net, const at::Tensor& x) {
      inner = net.second->forward(net.first->forward(x).tanh());
      return inner * 2;
    };
    model->forward(Rows(0, 3, kDim));
    const absl::Status status = TorchToStatus("backward", [&] {
      inner.square().sum().backward({}, /*retain_graph=*/true,
                                    /*create_graph=*/true);
    });
    FSDP_RETURN_IF_ERROR(
        Expect(status, Code::kFailedPrecondition, "create_graph=true"));
    c10::NoGradGuard no_grad;
    model->module()->act = nullptr;
    model->forward(Rows(0, 3, kDim));
    c10::AutoGradMode grad(true);
    return CheckStepIsExact(model, communicator);
  }));
}

TEST(TransparentErrorsTest, AutogradGradWithRespectToAParameter) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    const at::Tensor x = Rows(0, 3, kDim).requires_grad_();
    const at::Tensor loss = model->forward(x).sum();
    const absl::Status status = TorchToStatus("grad", [&] {
      torch::autograd::grad({loss}, {model.module()->first->weight});
    });
    FSDP_RETURN_IF_ERROR(
        Expect(status, Code::kFailedPrecondition, "a parameter of unit first"));
    // The gradient with respect to the input equals that without sharding.
    const at::Tensor again = model->forward(x).sum();
    const at::Tensor gradient = torch::autograd::grad({again}, {x})[0];
    Acting plain;
    const at::Tensor expected =
        torch::autograd::grad({plain.forward(x).sum()}, {x})[0];
    FSDP_RETURN_IF_ERROR(
        CheckTensor(gradient, expected, 1e-5, 1e-8, "gradient of the input"));
    return CheckStepIsExact(model, communicator);
  }));
}

// --- Operators inside operators ----------------------------------------------

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
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    model->module()->act = [](Acting& net, const at::Tensor& x) {
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
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->forward(Rows(0, 3, kDim)).item<float>(), Eq(1),
                  "whether the input has stayed"));
    c10::AutoGradMode grad(true);
    return CheckStepIsExact(model, communicator);
  }));
}

// --- Exceptions and failures -------------------------------------------------

TEST(TransparentErrorsTest, AnExceptionInBackwardLeavesAnotherBackwardExact) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    FSDP_ASSIGN_OR_RETURN(Model fresh, ShardActing(communicator));
    const at::Tensor x = Rows(0, 3, kDim);
    const at::Tensor fails = model->forward(x).sum();
    at::Tensor other = model->forward(x);
    // This loss enters backward without the root's output.
    const at::Tensor loss = other.square().mean();
    const at::Tensor bad = fails * 2;
    fails.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw UsersError("hook"); });
    if (TorchToStatus("b", [&] { bad.backward(); }).ok()) {
      return absl::InternalError("the hook did not throw");
    }
    FSDP_RETURN_IF_ERROR(TorchToStatus("b", [&] { loss.backward(); }));
    FSDP_RETURN_IF_ERROR(fresh->Backward(fresh->forward(x).square().mean()));
    FSDP_RETURN_IF_ERROR(CheckSameGradients(*model, *fresh));
    return CheckStepIsExact(model, communicator);
  }));
}

// If a collective fails inside an operator's callback, the step's error is the
// collective's, not that of the operator, which then finds no memory.
void ExpectReportsFailureOf(const std::string& label, int64_t nth,
                            bool through_us) {
  auto group = comm::CreateLocalGroup(kRanks);
  ASSERT_OK(group.status());
  comm::testing::FailurePlan plan;
  plan.label = label;
  plan.nth = nth;
  plan.error = absl::UnavailableError("the cable was pulled");
  (*group)[1] = FailOnPlan(std::move((*group)[1]), plan);
  const std::vector<absl::Status> statuses =
      RunRanks(*group, [&](Communicator& communicator) -> absl::Status {
        Options options = TransparentOptions();
        options.abort_on_failure = true;
        options.prefetch.forward = options.prefetch.backward = false;
        FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator, options));
        return TorchToStatus("step", [&] {
          const at::Tensor loss = model->forward(Rows(0, 3, kDim)).sum();
          if (through_us) {
            ThrowIfError(model->Backward(loss));
          } else {
            loss.backward();
          }
        });
      });
  if (through_us) {
    EXPECT_THAT(statuses[1], StatusIs(Code::kUnavailable,
                                      HasSubstr("the cable was pulled")));
    EXPECT_THAT(statuses[0],
                StatusIs(Code::kAborted, HasSubstr("the cable was pulled")));
  } else {
    EXPECT_FALSE(statuses[0].ok());
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST(TransparentErrorsTest, AGatherThatFailsInForward) {
  // The first of a unit's calls broadcasts its parameters.
  ExpectReportsFailureOf("second", 1, /*through_us=*/true);
}

TEST(TransparentErrorsTest, AGatherThatFailsInBackward) {
  ExpectReportsFailureOf("second", 2, /*through_us=*/true);
  ExpectReportsFailureOf("second", 2, /*through_us=*/false);
}

TEST(TransparentErrorsTest, RanksThatRunDifferentUnits) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& communicator) -> absl::Status {
        Options options = TransparentOptions();
        options.abort_on_failure = true;
        FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator, options));
        model->module()->act = [&](Acting& net, const at::Tensor& x) {
          return communicator.rank() == 0 ? net.first->forward(x)
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
