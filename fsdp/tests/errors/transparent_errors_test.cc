// The refusals of transparent units.
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <thread>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/acting_net.h"

namespace fsdp::testing::acting_net {
namespace {

using Code = absl::StatusCode;

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
    if (!at::allclose(shard.values.grad(), OwnPart(shard, expected))) {
      return absl::InternalError(shard.name);
    }
    return CheckStepIsExact(model, communicator);
  }));
}

// --- Autograd ----------------------------------------------------------------

TEST(TransparentErrorsTest, CreateGraph) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    const absl::Status status = TorchToStatus("backward", [&] {
      model->forward(Rows(0, 3, kDim))
          .sum()
          .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    });
    FSDP_RETURN_IF_ERROR(
        Expect(status, Code::kFailedPrecondition, "create_graph=true"));
    return CheckStepIsExact(model, communicator);
  }));
}

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

TEST(TransparentErrorsTest, ABackwardAfterTheModelIsGone) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& communicator) -> absl::Status {
    at::Tensor loss;
    {
      FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
      loss = model->forward(Rows(0, 3, kDim)).sum();
    }
    return Expect(TorchToStatus("backward", [&] { loss.backward(); }),
                  Code::kFailedPrecondition, "model was destroyed");
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

}  // namespace
}  // namespace fsdp::testing::acting_net
