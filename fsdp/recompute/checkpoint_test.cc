#include "fsdp/recompute/checkpoint.h"

// Regions without units: their arguments and results, what they keep and what
// they refuse. For units see checkpoint_units_test.cc.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/testing/users_error.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 3;

at::Tensor Input() { return Rows(1, 2, kDim).requires_grad_(); }

Linear MakeLinear() {
  Linear linear(kDim, kDim);
  FillParameters(*linear, 2);
  return linear;
}

// Returns the gradient of the input, of which `run` makes a scalar.
at::Tensor GradientOf(const std::function<at::Tensor(const at::Tensor&)>& run) {
  const at::Tensor input = Input();
  run(input).backward();
  return input.grad();
}

absl::Status Backward(const at::Tensor& loss) {
  return TorchToStatus("backward", [&] { loss.backward(); });
}

TEST(CheckpointTest, ParametersGetGradientsWhereNoArgumentDoes) {
  Linear linear = MakeLinear();
  const auto run = [&] {
    return Checkpoint([&](const at::Tensor& x) { return linear->forward(x); },
                      Rows(0, 1, kDim));
  };
  const at::Tensor y = run();
  ASSERT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(linear->weight.grad().defined());
  const c10::NoGradGuard no_grad;  // makes it a plain call
  EXPECT_FALSE(run().requires_grad());
}

TEST(CheckpointTest, TakesArgumentsOfAnyKind) {
  const auto fn = [](Linear linear, const at::Tensor& x,
                     const std::vector<at::Tensor>& more,
                     const std::optional<at::Tensor>& none, int times,
                     const char* name, const std::unique_ptr<int>& move_only,
                     const std::tuple<at::Tensor, int>& pair) {
    EXPECT_STREQ(name, "name");
    EXPECT_FALSE(none.has_value());
    return linear->forward(x) * times * more[0] * *move_only +
           more[1] * std::get<0>(pair) * std::get<1>(pair);
  };
  const auto run = [&](bool region, const at::Tensor& x) {
    Linear linear = MakeLinear();
    const std::vector<at::Tensor> more = {x, Rows(5, 2, kDim)};
    const auto call = [&](auto invoke) {
      return invoke(fn, linear, x, more, std::optional<at::Tensor>(), 3, "name",
                    std::make_unique<int>(2),
                    std::make_tuple(at::Tensor(x * 3), 4));
    };
    const at::Tensor y =
        region ? call([](auto&&... parts) {
          return Checkpoint(std::forward<decltype(parts)>(parts)...);
        })
               : call([](auto&& fn, auto&&... parts) {
                   return fn(std::forward<decltype(parts)>(parts)...);
                 });
    return y.sum();
  };
  EXPECT_TRUE(at::allclose(
      GradientOf([&](const at::Tensor& x) { return run(true, x); }),
      GradientOf([&](const at::Tensor& x) { return run(false, x); })));
}

TEST(CheckpointTest, ReturnsTreesOfTensors) {
  using Result = std::tuple<at::Tensor, std::vector<at::Tensor>, int>;
  const auto fn = [](const at::Tensor& x) -> Result {
    const at::Tensor y = at::tanh(x);
    return {y, {y * 2, (y > 0).to(at::kLong), at::Tensor(), y * 5, x}, 7};
  };
  const auto loss = [](const Result& result) {
    const auto& [y, more, seven] = result;
    EXPECT_EQ(seven, 7);
    EXPECT_FALSE(more[1].requires_grad());
    EXPECT_FALSE(more[2].defined());
    // The function does not use more[3].
    return (y * more[0] * more[1] + more[4] * seven).sum();
  };
  EXPECT_TRUE(at::allclose(
      GradientOf([&](const at::Tensor& x) { return loss(Checkpoint(fn, x)); }),
      GradientOf([&](const at::Tensor& x) { return loss(fn(x)); })));
}

TEST(CheckpointTest, ResultsAndViewsMayBeModifiedInPlaceAfterwards) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = at::tanh(x);
    return std::make_pair(y.narrow(1, 0, 2), y * 2);
  };
  const auto loss = [](std::pair<at::Tensor, at::Tensor> parts) {
    parts.first.mul_(3);
    parts.second.narrow(0, 0, 1).mul_(4);
    at::relu_(parts.second);
    return parts.first.square().sum() + parts.second.square().sum();
  };
  EXPECT_TRUE(at::allclose(
      GradientOf([&](const at::Tensor& x) { return loss(Checkpoint(fn, x)); }),
      GradientOf([&](const at::Tensor& x) {
        auto [first, second] = fn(x);
        return loss({first.clone(), second});
      })));
}

TEST(CheckpointTest, NothingComputedInsideOutlivesTheForward) {
  c10::weak_intrusive_ptr<c10::TensorImpl> inside(
      at::ones({1}).getIntrusivePtr());
  const at::Tensor x = Input();
  const at::Tensor y = Checkpoint(
      [&](const at::Tensor& x) {
        const at::Tensor hidden = at::tanh(x);
        inside =
            c10::weak_intrusive_ptr<c10::TensorImpl>(hidden.getIntrusivePtr());
        return at::tanh(hidden);
      },
      x);
  EXPECT_TRUE(inside.expired());
  y.sum().backward();
  EXPECT_TRUE(inside.expired());
  EXPECT_TRUE(x.grad().defined());
}

TEST(CheckpointTest, ArgumentsLiveUntilBackwardHasUsedThem) {
  at::Tensor x = Input();
  at::Tensor hidden = x * 2;
  const auto memory = hidden.storage().getWeakStorageImpl();
  const at::Tensor loss = Checkpoint(at::tanh, hidden).sum();
  hidden.reset();
  EXPECT_FALSE(memory.expired());
  loss.backward();
  EXPECT_TRUE(memory.expired());
}

TEST(CheckpointTest, NestedRegionsRunOncePerRegionAround) {
  int inner = 0;
  const auto nested = [&](const at::Tensor& x) {
    return Checkpoint(
        [&](const at::Tensor& x) {
          const at::Tensor y = at::tanh(x);
          return Checkpoint(
              [&](const at::Tensor& y) {
                ++inner;
                return at::tanh(y);
              },
              y);
        },
        x);
  };
  EXPECT_TRUE(at::equal(
      GradientOf([&](const at::Tensor& x) { return nested(x).sum(); }),
      GradientOf(
          [](const at::Tensor& x) { return at::tanh(at::tanh(x)).sum(); })));
  EXPECT_EQ(inner, 3);
}

at::Tensor Deep(int depth, const at::Tensor& x) {
  at::Tensor y = at::tanh(x);
  if (depth == 0) return y;
  return Checkpoint([depth](const at::Tensor& y) { return Deep(depth - 1, y); },
                    y);
}

at::Tensor Tanhs(int count, at::Tensor x) {
  for (int i = 0; i < count; ++i) x = at::tanh(x);
  return x;
}

// Past a depth of 60 LibTorch goes on in another thread.
TEST(CheckpointTest, RegionsNestDeeply) {
  EXPECT_TRUE(at::equal(
      GradientOf([](const at::Tensor& x) { return Deep(70, x).sum(); }),
      GradientOf([](const at::Tensor& x) { return Tanhs(71, x).sum(); })));
}

TEST(CheckpointTest, RandomNumbersAreTheSameAndThoseAfterwardsToo) {
  const auto fn = [](const at::Tensor& x) {
    return at::dropout(x * 2, 0.5, /*train=*/true);
  };
  const auto run = [&](auto call) {
    at::manual_seed(11);
    const at::Tensor gradient =
        GradientOf([&](const at::Tensor& x) { return call(x).sum(); });
    return std::make_pair(gradient, at::rand({4}));
  };
  const auto plain = run(fn);
  const auto kept = run([&](const at::Tensor& x) { return Checkpoint(fn, x); });
  EXPECT_TRUE(at::equal(kept.first, plain.first));
  EXPECT_TRUE(at::equal(kept.second, plain.second));
  CheckpointOptions options;
  options.preserve_rng_state = false;
  const auto not_kept =
      run([&](const at::Tensor& x) { return CheckpointWith(options, fn, x); });
  EXPECT_FALSE(at::equal(not_kept.second, plain.second));
}

class AutocastToBFloat16 {
 public:
  AutocastToBFloat16() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~AutocastToBFloat16() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(CheckpointTest, RecomputesUnderTheAutocastOfTheForward) {
  Linear linear = MakeLinear();
  const auto fn = [&](const at::Tensor& x) {
    return linear->forward(x).to(at::kFloat);
  };
  const auto run = [&](auto call) {
    return GradientOf([&](const at::Tensor& x) {
      const AutocastToBFloat16 autocast;
      return call(x).square().sum();
    });
  };
  const at::Tensor plain = run(fn);
  const at::Tensor in_float =
      GradientOf([&](const at::Tensor& x) { return fn(x).square().sum(); });
  ASSERT_FALSE(at::equal(plain, in_float));
  EXPECT_TRUE(at::equal(
      run([&](const at::Tensor& x) { return Checkpoint(fn, x); }), plain));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(CheckpointTest, ARetainedGraphHasASecondBackward) {
  const at::Tensor x = Input();
  const at::Tensor loss = Checkpoint(at::tanh, x).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * once));
}

TEST(CheckpointTest, ReleasedGraphRefusesASecondBackward) {
  const at::Tensor y =
      Checkpoint([](const at::Tensor& x) { return x * 2; }, Input());
  EXPECT_OK(Backward(y.sum()));
  EXPECT_THAT(Backward(y.sum()),
              StatusIs(Code::kFailedPrecondition, HasSubstr("retain_graph")));
}

TEST(CheckpointTest, RefusesAFunctionThatModifiesAnArgument) {
  const auto run = [](const at::Tensor& x, const at::Tensor& y) {
    return TorchToStatus("forward", [&] {
      Checkpoint(
          [](const at::Tensor&, const at::Tensor& y) { return y.mul_(2); }, x,
          y);
    });
  };
  EXPECT_THAT(
      run(Input(), at::ones({2})),
      StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("modified tensor 1"),
                                                HasSubstr("Modify a copy"))));
}

TEST(CheckpointTest, RefusesDoubleBackward) {
  const at::Tensor y = Checkpoint(at::tanh, Input());
  EXPECT_THAT(TorchToStatus("b",
                            [&] {
                              y.sum().backward({}, /*retain_graph=*/true,
                                               /*create_graph=*/true);
                            }),
              StatusIs(Code::kFailedPrecondition, HasSubstr("create_graph")));
}

TEST(CheckpointTest, RefusesAutogradGrad) {
  const at::Tensor x = Input();
  const at::Tensor y = Checkpoint(at::tanh, x);
  EXPECT_THAT(
      TorchToStatus("b", [&] { torch::autograd::grad({y.sum()}, {x}); }),
      StatusIs(Code::kFailedPrecondition, HasSubstr("torch::autograd::grad")));
}

TEST(CheckpointTest, RefusesARecomputationWithOtherResults) {
  int calls = 0;
  const at::Tensor other_shape = Checkpoint(
      [&](const at::Tensor& x) { return x.narrow(0, 0, 2 - calls++) * 2; },
      Input());
  EXPECT_THAT(
      Backward(other_shape.sum()),
      StatusIs(Code::kFailedPrecondition,
               HasSubstr("gave Float [1, 3] on cpu as tensor 0 of its result "
                         "instead of Float [2, 3] on cpu")));
  calls = 0;
  const std::vector<at::Tensor> other_count = Checkpoint(
      [&](const at::Tensor& x) {
        return std::vector<at::Tensor>(2 - calls++, x * 2);
      },
      Input());
  EXPECT_THAT(Backward(other_count[0].sum()),
              StatusIs(Code::kFailedPrecondition,
                       HasSubstr("gave 1 tensors instead of 2")));
}

TEST(CheckpointTest, ExceptionsKeepTheirTypeAndLeaveGraphsUsable) {
  bool fails = false;
  const auto fn = [&](const at::Tensor& x) {
    if (fails) throw UsersError("on demand");
    return at::tanh(x);
  };
  const auto nested = [&](const at::Tensor& x) {
    return Checkpoint([&](const at::Tensor& x) { return Checkpoint(fn, x); },
                      x);
  };
  const at::Tensor expected =
      GradientOf([](const at::Tensor& x) { return at::tanh(x).sum(); });
  for (int round = 0; round < 3; ++round) {
    fails = true;
    EXPECT_THROW(nested(Input()), UsersError);
    fails = false;
    const at::Tensor loss = nested(Input()).sum();
    fails = true;
    EXPECT_THROW(loss.backward(), UsersError);
    fails = false;
    EXPECT_TRUE(c10::GradMode::is_enabled());
    EXPECT_TRUE(at::equal(
        GradientOf([&](const at::Tensor& x) { return nested(x).sum(); }),
        expected));
  }
}

TEST(CheckpointTest, RandomNumbersGoOnAfterAnExceptionInTheRecomputation) {
  int calls = 0;
  at::manual_seed(3);
  const at::Tensor y = Checkpoint(
      [&](const at::Tensor& x) {
        if (++calls == 2) throw std::runtime_error("second call");
        return at::dropout(x, 0.5, /*train=*/true);
      },
      Input());
  EXPECT_THAT(Backward(y.sum()),
              StatusIs(Code::kUnknown, HasSubstr("second call")));
  const at::Tensor after = at::rand({4});
  at::manual_seed(3);
  at::dropout(Input(), 0.5, /*train=*/true);
  EXPECT_TRUE(at::equal(after, at::rand({4})));
}

}  // namespace
}  // namespace fsdp::testing
