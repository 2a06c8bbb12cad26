#include "fsdp/script_module.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/optim/sgd.h>

#include <sstream>

#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using ::torch::jit::Module;

constexpr int64_t kDim = 5;

// Holds the types of one program, like those of the submodules of a loaded
// module.
class Program {
 public:
  Module New(const std::string& type) {
    Module module(c10::QualifiedName("__torch__." + type), unit_);
    module.register_attribute("training", c10::BoolType::get(), true);
    return module;
  }

 private:
  std::shared_ptr<torch::jit::CompilationUnit> unit_ =
      std::make_shared<torch::jit::CompilationUnit>();
};

void AddParameter(Module& module, const std::string& name,
                  const std::vector<int64_t>& sizes, bool trainable = true) {
  module.register_parameter(name, at::zeros(sizes).set_requires_grad(trainable),
                            false);
}

// Makes a module with a frozen scale, a loop, and a branch on the mode.
Module MakeBlock(Program& program) {
  Module block = program.New("Block");
  AddParameter(block, "up", {2 * kDim, kDim});
  AddParameter(block, "bias", {2 * kDim});
  AddParameter(block, "down", {kDim, 2 * kDim});
  AddParameter(block, "scale", {kDim}, /*trainable=*/false);
  block.register_buffer("offset", at::ones({kDim}));
  block.define(R"(
def forward(self, x):
    y = torch.tanh(torch.linear(x, self.up, self.bias))
    for i in range(2):
        y = y * 0.5 + torch.sigmoid(y)
    if self.training:
        y = y + 0.25
    return x + torch.linear(y, self.down) * self.scale + self.offset
)");
  return block;
}

// Returns a module of the same type with parameters of its own.
Module AnotherLike(const Module& module) {
  const c10::NoGradGuard no_grad;
  Module other = module.deepcopy();
  for (const auto& item : module.named_parameters()) {
    other.attr(item.name).toTensor().set_requires_grad(
        item.value.requires_grad());
  }
  return other;
}

// Makes a net of two blocks and parameters of its own. The second block is used
// twice and from two places; one returns before it has used all parameters.
Module MakeNet() {
  Program program;
  Module net = program.New("Net");
  AddParameter(net, "embed", {kDim, kDim});
  AddParameter(net, "head", {kDim, kDim});
  const Module first = MakeBlock(program);
  const Module second = AnotherLike(first);
  net.register_module("first", first);
  net.register_module("second", second);
  net.register_module("again", second);
  net.define(R"(
def forward(self, x):
    y = self.first.forward(torch.linear(x, self.embed))
    y = self.again.forward(self.second.forward(y))
    return torch.linear(y, self.head)
)");
  return net;
}

Module SavedAndLoaded(const Module& module) {
  std::stringstream file;
  module.save(file);
  return torch::jit::load(file);
}

std::shared_ptr<ScriptModuleImpl> Filled(const Module& script) {
  auto module = std::make_shared<ScriptModuleImpl>(script);
  FillParameters(*module, 1);
  return module;
}

// Decay shows a gradient of zeros instead of none.
TEST(ScriptModuleTest, TrainsAsPlainFromSourceOrAFile) {
  TrainingTask task;
  task.steps = 4;  // TorchScript optimises after two
  task.loss = [](const TensorFunction& forward, int64_t part) {
    return forward(Rows(3 * part, 3, kDim)).square().mean();
  };
  task.optimizer = Sgd(0.1, /*weight_decay=*/0.01);
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapScriptModules({"Block"});
  for (const bool loaded : {false, true}) {
    for (int world_size : {1, 2, 3}) {
      EXPECT_OK(RunAllRanks(
          world_size,
          [&](Communicator& world) -> absl::Status {
            FSDP_ASSIGN_OR_RETURN(
                const Mesh mesh, Mesh::Create(Unowned(world), {{"shard", -1}}));
            return CheckTask<ScriptModuleImpl>(
                task,
                [&] {
                  return Filled(loaded ? SavedAndLoaded(MakeNet()) : MakeNet());
                },
                mesh, options, 1e-4, 1e-5);
          }))
          << loaded;
    }
  }
}

// TorchScript must not keep the parameters of earlier forwards.
TEST(ScriptModuleTest, EvaluationSeesWhatTheOptimizerHasWritten) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto plain = Filled(MakeNet());
    Options options;
    options.wrap_policy = WrapScriptModules({"Block"});
    const Module script = Filled(MakeNet())->script();
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(script, Unowned(world), options));
    c10::NoGradGuard no_grad;
    const at::Tensor x = Rows(0, 3, kDim);
    for (int round = 0; round < 5; ++round) {
      const bool training = round % 2 == 0;
      plain->train(training);
      model->module()->train(training);
      FSDP_RETURN_IF_ERROR(CheckTensor(model->forward({x}).toTensor(),
                                       plain->forward({x}).toTensor(), 1e-5,
                                       1e-8, "output"));
      EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0) << round;
      for (at::Tensor& p : plain->parameters()) p.mul_(1.125);
      for (at::Tensor& shard : model->Parameters()) shard.mul_(1.125);
      // A module in two places is one, but parameters() lists it twice.
      auto again = plain->named_children()["again"]->parameters();
      for (at::Tensor& p : again) p.div_(1.125);
    }
    return absl::OkStatus();
  }));
}

TEST(ScriptModuleTest, OutputsInContainersAnnounceTheBackward) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Program program;
    Module net = program.New("Containers");
    AddParameter(net, "w", {kDim, kDim});
    net.define(R"(
def forward(self, xs: List[Tensor], d: Dict[str, Tensor]):
    y = torch.linear(xs[0] + d["x"], self.w)
    return {"y": y}, [y * 2, y.detach()], (y * 3, 4), None
)");
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    const at::Tensor x = Rows(0, 3, kDim);
    c10::Dict<std::string, at::Tensor> d;
    d.insert("x", x);
    const c10::IValue output =
        model->forward({c10::List<at::Tensor>({x}), c10::IValue(d)});
    const auto& parts = output.toTupleRef().elements();
    at::Tensor loss = parts[0].toGenericDict().at("y").toTensor().sum();
    loss = loss + parts[1].toTensorVector()[0].sum();
    loss = loss + parts[2].toTupleRef().elements()[0].toTensor().sum();
    EXPECT_EQ(parts[2].toTupleRef().elements()[1].toInt(), 4);
    EXPECT_TRUE(parts[3].isNone());
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    const TensorRange& shard = model->Ranges()[0];
    const at::Tensor expected =
        (12 * x.sum(0)).expand({kDim, kDim}).reshape({-1});
    return CheckTensor(shard.values.grad(),
                       expected.narrow(0, shard.begin, shard.values.numel()),
                       1e-5, 1e-8, "gradient");
  }));
}

// Python's frontend is where `fork` usually comes from.
class ForkResolver : public torch::jit::NativeResolver {
 public:
  std::shared_ptr<torch::jit::SugaredValue> resolveValue(
      const std::string& name, torch::jit::GraphFunction& function,
      const torch::jit::SourceRange& range) override {
    if (name == "fork") {
      return torch::jit::SpecialFormValue::create(torch::jit::prim::fork);
    }
    return NativeResolver::resolveValue(name, function, range);
  }
};

TEST(ScriptModuleTest, RefusesForksAndNamesTheUnit) {
  const std::vector<absl::Status> statuses =
      RunRanks(2, [](Communicator& world) -> absl::Status {
        Program program;
        Module net = program.New("Forks");
        net.register_module("block", MakeBlock(program));
        net.define(R"(
def forward(self, x):
    y = fork(self.block.forward, x)
    return torch.wait(y)
)",
                   std::make_shared<ForkResolver>());
        Options options;
        options.wrap_policy = WrapScriptModules({"Block"});
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), options));
        return TorchToStatus("forward",
                             [&] { model->forward({Rows(0, 3, kDim)}); });
      });
  EXPECT_THAT(statuses, AllRefuse("unit block on another"));
}

TEST(ScriptModuleTest, TheScriptItselfRunsInTheModelsForwardOnly) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Module net = MakeNet();
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    FSDP_RETURN_IF_ERROR(CheckRefused(
        TorchToStatus("script", [&] { net.forward({Rows(0, 3, kDim)}); }),
        "are sharded, and"));
    return model->Backward(model->forward({Rows(0, 3, kDim)}).toTensor().sum());
  }));
}

void ExpectRefused(const std::function<Module()>& make, const Options& options,
                   Code code, const std::string& text) {
  EXPECT_THAT(
      RunRanks(2,
               [&](Communicator& world) {
                 return FullyShard(make(), Unowned(world), options).status();
               }),
      Each(StatusIs(code, HasSubstr(text))));
}

TEST(ScriptModuleTest, RefusesAnOptimizerMadeBefore) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Module net = MakeNet();
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& p : net.parameters()) parameters.push_back(p);
    const torch::optim::SGD optimizer(std::move(parameters), 0.1);
    return CheckRefused(FullyShard(net, Unowned(world)).status(),
                        "an optimizer");
  }));
}

TEST(ScriptModuleTest, RefusesToRecomputeUnits) {
  Options options;
  options.wrap_policy = WrapScriptModules({"Block"});
  options.recompute.units = EveryUnit();
  ExpectRefused(MakeNet, options, Code::kInvalidArgument,
                "recompute.units of a script");
}

TEST(ScriptModuleTest, RefusesAFrozenScript) {
  const auto make = [] {
    Module net = MakeNet();
    net.eval();
    return torch::jit::freeze(net);
  };
  ExpectRefused(make, Options(), Code::kInvalidArgument, "has no parameters");
}

}  // namespace
}  // namespace fsdp::testing
