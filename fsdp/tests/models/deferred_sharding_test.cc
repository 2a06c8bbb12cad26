// Sharding models without memory.
#include <ATen/ops/full.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/utils.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/testing/random_operators.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/model/forward.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/trained_values.h"
#include "ranges/tensor_range.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 6;
constexpr uint64_t kSeed = 11;

class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(int64_t dim)
      : linear(register_module("linear", Linear(dim, dim))),
        norm(register_module("norm", torch::nn::BatchNorm1d(dim))) {
    torch::nn::init::orthogonal_(linear->weight);
    scale = register_buffer("scale", torch::full({dim}, 0.5));
    register_parameter("gaps", torch::rand({dim, 5}).narrow(1, 0, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(linear->forward(x)).tanh() * scale;
  }
  Linear linear;
  torch::nn::BatchNorm1d norm;
  at::Tensor scale;
};

// The head's weight is the embedding's.
class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(int64_t dim, int layers)
      : embed(register_module("embed", Linear(dim, dim))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", Linear(dim, dim))) {
    for (int i = 0; i < layers; ++i) {
      blocks->push_back(std::make_shared<LayerImpl>(dim));
    }
    ThrowIfError(Tie(embed->weight, head->weight));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = embed->forward(x);
    for (const auto& block : *blocks) {
      y = Forward(std::static_pointer_cast<LayerImpl>(block), y);
    }
    return head->forward(y);
  }
  Linear embed;
  torch::nn::ModuleList blocks;
  Linear head;
};

DeferredInitOptions Everything() { return {/*min_bytes=*/0}; }

std::shared_ptr<NetImpl> MakeDeferred(uint64_t seed, int64_t dim = kDim,
                                      int layers = 2) {
  // The ranks are threads, which share the generator.
  static absl::Mutex mutex;
  const absl::MutexLock lock(&mutex);
  torch::manual_seed(seed);
  const DeferredInit deferred(Everything());
  return std::make_shared<NetImpl>(dim, layers);
}

Options LayerUnits() { return UnitsOf<LayerImpl>(); }

// Returns the values of construction without sharding.
Values PlainValues(uint64_t seed) {
  const std::shared_ptr<NetImpl> net = MakeDeferred(seed);
  ThrowIfError(Materialize(*net));
  return ValuesOf(*net);
}

absl::Status CheckValues(const FullyShardedDataParallel<NetImpl>& model,
                         const Values& expected) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
  return CheckEqual(ValuesOf(dict), expected);
}

class WorldTest : public ::testing::TestWithParam<int> {
 protected:
  using Body = std::function<absl::Status(Communicator&)>;
  absl::Status Run(const Body& body) { return RunAllRanks(GetParam(), body); }
};

TEST_P(WorldTest, ValuesAreThoseOfThePlainModelWhateverTheNumberOfRanks) {
  const Values expected = PlainValues(kSeed);
  for (const bool broadcast : {true, false}) {
    EXPECT_OK(Run([&](Communicator& world) -> absl::Status {
      Options options = LayerUnits();
      options.init.broadcast = broadcast;
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(MakeDeferred(kSeed), Unowned(world), options));
      return CheckValues(model, expected);
    }));
  }
}

// The other ranks have other values, and one of them, or none, ordinary ones.
TEST_P(WorldTest, Rank0sValuesCountWhateverTheOthersHave) {
  const Values expected = PlainValues(kSeed);
  for (const int ordinary : {-1, 0, 1}) {
    EXPECT_OK(Run([&](Communicator& world) -> absl::Status {
      auto net = MakeDeferred(kSeed + world.rank());
      if (world.rank() == ordinary) FSDP_RETURN_IF_ERROR(Materialize(*net));
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(net, Unowned(world), LayerUnits()));
      return CheckValues(model, expected);
    }));
  }
}

// A function gives the values, module by module.
TEST_P(WorldTest, AFunctionInitialisesEachDeferredModuleOnce) {
  const Values constructed = PlainValues(kSeed);
  for (const bool broadcast : {true, false}) {
    EXPECT_OK(Run([&](Communicator& world) -> absl::Status {
      std::vector<std::string> paths;
      Options options = LayerUnits();
      options.init.broadcast = broadcast;
      options.init.seed = 3;
      options.init.module = [&](const std::string& path,
                                torch::nn::Module& module) {
        paths.push_back(path);
        for (at::Tensor& tensor : module.parameters(/*recurse=*/false)) {
          tensor.uniform_();
        }
        for (at::Tensor& tensor : module.buffers(/*recurse=*/false)) {
          tensor.fill_(2);
        }
        return absl::OkStatus();
      };
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(MakeDeferred(kSeed), Unowned(world), options));
      std::sort(paths.begin(), paths.end());
      const std::vector<std::string> expected_paths = {
          "blocks.0",        "blocks.0.linear", "blocks.0.norm", "blocks.1",
          "blocks.1.linear", "blocks.1.norm",   "embed",         "head"};
      const bool called = world.rank() == 0 || !broadcast;
      EXPECT_EQ(paths, called ? expected_paths : std::vector<std::string>());
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      // The seeds depend on the paths alone: the same for all worlds.
      static absl::Mutex mutex;
      static Values first ABSL_GUARDED_BY(mutex);
      Values expected;
      {
        const absl::MutexLock lock(&mutex);
        if (first.empty()) first = ValuesOf(dict);
        expected = first;
      }
      const at::Tensor& weight = expected.at("blocks.0.linear.weight");
      EXPECT_FALSE(at::equal(weight, expected.at("blocks.1.linear.weight")));
      EXPECT_FALSE(at::equal(weight, constructed.at("blocks.0.linear.weight")));
      EXPECT_EQ(expected.at("blocks.1.scale").sum().item<float>(), 2 * kDim);
      return CheckValues(model, expected);
    }));
  }
}

// Values come later, as with files: nothing is drawn, and nothing computes with
// missing values.
TEST_P(WorldTest, WhatIsLoadedLaterIsNotDrawn) {
  const auto missing = [](const std::string& name) {
    return StatusIs(Code::kFailedPrecondition,
                    HasSubstr("parameter " + name + " has no values"));
  };
  EXPECT_OK(Run([&](Communicator& world) -> absl::Status {
    const Values files = PlainValues(kSeed + 1);
    Options options = GoOn(LayerUnits());
    options.init.loaded_later = [](const std::string&) { return true; };
    auto net = MakeDeferred(kSeed);
    const testing::RandomOperators random;
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    EXPECT_EQ(random.count(), 0);
    const absl::Status gathered = model->GatherStateDict().status();
    EXPECT_THAT(gathered, missing("embed.weight"));
    const at::Tensor x = Rows(0, 4, kDim);
    // A rank that has no part of the first one has nothing to refuse.
    if (model->Ranges()[0].values.numel() > 0) {
      EXPECT_THAT(TorchToStatus("forward", [&] { model->forward(x); }),
                  missing("embed.weight"));
    }
    StateDict dict;
    for (const auto& [name, value] : files) dict.insert(name, value);
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
    model->eval();
    model->forward(x);
    return CheckValues(model, files);
  }));
}

TEST_P(WorldTest, WhatIsNotLoadedLaterHasTheValuesOfEver) {
  const Values expected = PlainValues(kSeed);
  EXPECT_OK(Run([&](Communicator& world) -> absl::Status {
    Options options = LayerUnits();
    options.init.loaded_later = [](const std::string& name) {
      return name == "blocks.1.linear.weight";
    };
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeDeferred(kSeed), Unowned(world), options));
    for (const TensorRange& named : model->Ranges()) {
      if (named.name != "blocks.1.linear.weight") continue;
      const c10::NoGradGuard no_grad;
      named.values.detach().copy_(OwnPart(named, expected.at(named.name)));
    }
    return CheckValues(model, expected);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, WorldTest, ::testing::Values(2, 3, 5, 8, 1));

TEST(MemoryTest, ConstructionAndShardingTakeTheShardsAndAFewUnits) {
  constexpr int kRanks = 4;
  constexpr int kLayers = 16;
  constexpr int64_t kWide = 64;
  constexpr int64_t kUnit = 4 * kWide * (kWide + 3);
  constexpr int64_t kModel = kLayers * kUnit + 4 * kWide * (kWide + 2);
  // The bound covers the flat unit and the initialization's temporaries: Q, R,
  // and copies of them.
  constexpr int64_t kBound = kModel / kRanks + 8 * kUnit;
  static_assert(kBound < kModel * 3 / 4);
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    const auto meter = std::make_shared<MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeDeferred(kSeed, kWide, kLayers),
                                     Unowned(world), LayerUnits()));
    return Check(meter->peak() <= kBound,
                 absl::StrCat(meter->peak(), " > ", kBound));
  }));
}

TEST(DeferredShardingTest, WhatIsIgnoredGetsItsOwnValues) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = LayerUnits();
    options.ignore.module = [](const std::string& path, auto&) {
      return path == "blocks.1";
    };
    auto net = MakeDeferred(kSeed + world.rank());
    FSDP_RETURN_IF_ERROR(FullyShard(net, Unowned(world), options).status());
    const Values own = PlainValues(kSeed + world.rank());
    for (const auto& item : net->blocks[1]->named_parameters()) {
      FSDP_RETURN_IF_ERROR(
          Check(at::equal(item.value(), own.at("blocks.1." + item.key())),
                item.key()));
    }
    return absl::OkStatus();
  }));
}

TEST(DeferredShardingTest, IsRefusedInsideTheScope) {
  EXPECT_THAT(
      RunRanks(2,
               [](Communicator& world) {
                 auto net = MakeDeferred(kSeed);
                 const DeferredInit deferred;
                 return FullyShard(net, Unowned(world), LayerUnits()).status();
               }),
      AllRefuse("end the scope first"));
}

TEST(DeferredShardingTest, AnInitialisationThatFailsOnRank0EndsAllRanks) {
  const std::vector<absl::Status> statuses =
      RunRanks(3, [](Communicator& world) {
        Options options = LayerUnits();
        options.init.module = [](const std::string& path, auto&) {
          return path == "blocks.1.norm" ? absl::NotFoundError("no such file")
                                         : absl::OkStatus();
        };
        return FullyShard(MakeDeferred(kSeed), Unowned(world), options)
            .status();
      });
  EXPECT_THAT(statuses, Each(::testing::Not(IsOk())));
  EXPECT_THAT(statuses[0],
              StatusIs(Code::kNotFound, HasSubstr("no such file")));
}

}  // namespace
}  // namespace fsdp::testing
