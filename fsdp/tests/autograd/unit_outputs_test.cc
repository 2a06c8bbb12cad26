// Inputs and outputs of units are viewed and modified in place by them and by
// their callers: values and gradients equal those of the same code without
// sharding, and what LibTorch refuses stays refused.

#include <cmath>

#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;
using Tensors = std::vector<at::Tensor>;

// What a unit does with the tensor it gets.
struct Body {
  std::string name;
  std::function<Tensors(Linear&, at::Tensor)> run;
  bool modifies_input = false;
  bool returns_input = false;  // or a view of it
};

const Body kBodies[] = {
    {"one",
     [](Linear& l, const at::Tensor& x) -> Tensors { return {Forward(l, x)}; }},
    {"a tensor and its view",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x);
       return {y, y.narrow(1, 0, 2)};
     }},
    {"a view before its tensor",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x);
       return {y.narrow(1, 0, 2), y};
     }},
    {"a view alone",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       return {Forward(l, x).narrow(1, 0, 3)};
     }},
    {"a transposed view",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       return {Forward(l, x).t()};
     }},
    {"views that overlap",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x);
       return {y.narrow(1, 0, 3), y.narrow(1, 1, 3)};
     }},
    {"one twice",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x);
       return {y, y};
     }},
    {"views that LibTorch lets nobody modify",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       return Forward(l, x).unbind(/*dim=*/0);
     }},
    {"its view modified inside",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x);
       const at::Tensor view = y.narrow(1, 0, 2);
       view.mul_(2);
       return {y, view};
     }},
    {"its input",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       return {Forward(l, x), x};
     },
     false, true},
    {"its input alone",
     [](Linear&, const at::Tensor& x) -> Tensors { return {x}; }, false, true},
    {"a view of its input",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       return {Forward(l, x), x.narrow(1, 1, 2)};
     },
     false, true},
    {"its input modified",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       x.mul_(3);
       return {Forward(l, x)};
     },
     true},
    {"its input modified by itself",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       const at::Tensor y = Forward(l, x).detach();
       x.mul_(Forward(l, x * 2));
       return {y};
     },
     true},
    {"its input modified and returned",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       x.mul_(3);
       return {Forward(l, x), x};
     },
     true, true},
    {"a view of its input modified",
     [](Linear& l, const at::Tensor& x) -> Tensors {
       x.narrow(1, 0, 2).mul_(3);
       return {Forward(l, x)};
     },
     true},
};

// What the caller does with what it gave and what it got.
struct Caller {
  std::string name;
  std::function<void(at::Tensor& given, Tensors& got)> run;
  bool modifies_given = false;
  bool modifies_got = false;
};

const Caller kCallers[] = {
    {"uses all", [](at::Tensor&, Tensors&) {}},
    {"drops the first", [](at::Tensor&, Tensors& got) { got[0].reset(); }},
    {"drops the last", [](at::Tensor&, Tensors& got) { got.back().reset(); }},
    {"drops what it gave", [](at::Tensor& given, Tensors&) { given.reset(); }},
    {"modifies the first", [](at::Tensor&, Tensors& got) { got[0].mul_(3); },
     false, true},
    {"modifies the last", [](at::Tensor&, Tensors& got) { got.back().mul_(3); },
     false, true},
    {"modifies both",
     [](at::Tensor&, Tensors& got) {
       got[0].mul_(3);
       got.back().mul_(got.back().detach());
     },
     false, true},
    {"modifies the first and uses the last",
     [](at::Tensor&, Tensors& got) {
       got[0].mul_(3);
       got[0].reset();
     },
     false, true},
    {"modifies a view of the first",
     [](at::Tensor&, Tensors& got) { got[0].narrow(0, 0, 1).mul_(3); }, false,
     true},
    {"modifies by an operator that keeps its result",
     [](at::Tensor&, Tensors& got) { got[0].tanh_(); }, false, true},
    {"modifies what it gave",
     [](at::Tensor& given, Tensors&) { given.mul_(3); }, true},
};

class BodyUnit : public torch::nn::Module {
 public:
  explicit BodyUnit(Body body)
      : linear(register_module("linear", Linear(kDim, kDim))),
        body_(std::move(body)) {}
  Tensors forward(at::Tensor x) { return body_.run(linear, std::move(x)); }
  Linear linear;

 private:
  const Body body_;
};

enum class Mode {
  kTrainable,
  kFrozen,
  kRootOwnsNothing,
  kRegion,
  kRegionInside
};
constexpr const char* kModes[] = {"trainable", "frozen", "owning nothing",
                                  "in a region", "of a region"};

class BodyNet : public torch::nn::Module {
 public:
  BodyNet(const Body& body, Mode mode)
      : unit(register_module("unit", std::make_shared<BodyUnit>(body))),
        mode_(mode) {
    FillParameters(*this, 1);
    if (mode == Mode::kRegionInside) {
      unit = replace_module("unit", std::make_shared<BodyUnit>(InRegion(body)));
      FillParameters(*this, 1);
    }
    if (mode != Mode::kFrozen) return;
    for (at::Tensor& p : unit->parameters()) p.set_requires_grad(false);
  }

  Tensors forward(at::Tensor x) {
    if (mode_ != Mode::kRegion) return Forward(unit, std::move(x));
    return Checkpoint([unit = unit](at::Tensor y) { return Forward(unit, y); },
                      std::move(x));
  }

  std::shared_ptr<BodyUnit> unit;

 private:
  static Body InRegion(Body body) {
    body.run = [run = body.run](Linear& linear, at::Tensor x) {
      return Checkpoint(
          [run, &linear](const at::Tensor& y) { return run(linear, y); },
          std::move(x));
    };
    return body;
  }

  const Mode mode_;
};

struct Outcome {
  double loss = 0;
  at::Tensor before;       // gradient of the layer before
  absl::Status gradients;  // of the sharded net: whether they are as expected
};

// Runs a layer before the net, the net, its caller and the loss.
template <typename Call, typename Backward>
absl::StatusOr<Outcome> Run(int rank, const Caller& caller, const Call& call,
                            const Backward& backward) {
  Linear first(kDim, kDim);
  FillParameters(*first, 7);
  Outcome outcome;
  FSDP_RETURN_IF_ERROR(TorchToStatus("the program", [&] {
    at::Tensor given = first->forward(Rows(int64_t{3} * rank, 3, kDim));
    Tensors got = call(given);
    caller.run(given, got);
    at::Tensor loss;
    double weight = 1;
    got.push_back(given);
    for (const at::Tensor& tensor : got) {
      weight += 1;
      if (!tensor.defined() || !tensor.requires_grad()) continue;
      const at::Tensor term = (tensor * tensor).sum() * weight;
      loss = loss.defined() ? loss + term : term;
    }
    ThrowIfError(backward(loss));
    outcome.loss = loss.template item<double>();
  }));
  outcome.before = first->weight.grad();
  return outcome;
}

// Adds the rank's share to `means`.
absl::StatusOr<Outcome> RunPlain(int rank, const Body& body, Mode mode,
                                 const Caller& caller, Gradients& means) {
  // Plain LibTorch has no regions.
  BodyNet net(body, mode == Mode::kFrozen ? mode : Mode::kTrainable);
  FSDP_ASSIGN_OR_RETURN(
      Outcome outcome,
      Run(
          rank, caller, [&](const at::Tensor& x) { return net.forward(x); },
          [](const at::Tensor& loss) {
            loss.backward();
            return absl::OkStatus();
          }));
  AddShare(net, /*world_size=*/2, means);
  return outcome;
}

// Compares gradients with `means`, if given.
absl::StatusOr<Outcome> RunSharded(Communicator& world, const Body& body,
                                   Mode mode, const Caller& caller,
                                   const Gradients* means) {
  const Options options = mode == Mode::kRootOwnsNothing ? UnitsOf<LinearImpl>()
                                                         : UnitsOf<BodyUnit>();
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(std::make_shared<BodyNet>(body, mode),
                                   Unowned(world), options));
  FSDP_ASSIGN_OR_RETURN(
      Outcome outcome,
      Run(
          world.rank(), caller,
          [&](const at::Tensor& x) { return model->forward(x); },
          [&](const at::Tensor& loss) { return model->Backward(loss); }));
  if (means != nullptr) {
    outcome.gradients = CheckOwnGradients(*model, *means, 1e-4, 1e-5);
  }
  FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().parameters.in_use_bytes,
                                 Eq(0), "bytes of parameters after backward"));
  return outcome;
}

// A region repeats its computation and refuses changed arguments. Its results
// may be modified where LibTorch refuses this for one operator's results.
bool MayDiffer(const Body& body, Mode mode, const Caller& caller,
               bool is_refused) {
  if (mode != Mode::kRegion && mode != Mode::kRegionInside) return false;
  return !is_refused || body.modifies_input || caller.modifies_given ||
         (caller.modifies_got && body.returns_input);
}

absl::Status Compare(Communicator& world, const Body& body, Mode mode,
                     const Caller& caller) {
  Gradients means;
  const auto plain0 = RunPlain(0, body, mode, caller, means);
  const auto plain1 = RunPlain(1, body, mode, caller, means);
  const auto& plain = world.rank() == 0 ? plain0 : plain1;
  const auto sharded =
      RunSharded(world, body, mode, caller, plain.ok() ? &means : nullptr);
  if (!plain.ok() || !sharded.ok()) {
    return Check(
        plain.ok() == sharded.ok() ||
            MayDiffer(body, mode, caller, /*is_refused=*/!sharded.ok()),
        absl::StrCat("plain: ", plain.status().message(),
                     "\nsharded: ", sharded.status().message()));
  }
  if (std::abs(plain->loss - sharded->loss) > 1e-4 * std::abs(plain->loss)) {
    return absl::InternalError(
        absl::StrCat("loss ", sharded->loss, " not ", plain->loss));
  }
  FSDP_RETURN_IF_ERROR(sharded->gradients);
  const at::Tensor& before = sharded->before;
  if (!before.defined() && !plain->before.defined()) return absl::OkStatus();
  return CheckTensor(before, plain->before, 1e-4, 1e-5,
                     "gradient of the layer before");
}

class UnitOutputsTest : public ::testing::TestWithParam<Mode> {};

TEST_P(UnitOutputsTest, AreThoseOfPlainLibTorchWhateverIsDoneToThem) {
  for (const Body& body : kBodies) {
    for (const Caller& caller : kCallers) {
      EXPECT_OK(RunAllRanks(2,
                            [&](Communicator& world) {
                              return Compare(world, body, GetParam(), caller);
                            }))
          << "a unit that returns " << body.name << ", a caller that "
          << caller.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, UnitOutputsTest,
    ::testing::Values(Mode::kTrainable, Mode::kFrozen, Mode::kRootOwnsNothing,
                      Mode::kRegion, Mode::kRegionInside),
    [](const auto& info) {
      std::string name = kModes[static_cast<int>(info.param)];
      name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
      return name;
    });

}  // namespace
}  // namespace fsdp::testing
