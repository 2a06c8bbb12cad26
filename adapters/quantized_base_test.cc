// Held against plain layers of the numbers that the int8 weights stand for.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "adapters/linear.h"
#include "adapters/lora.h"
#include "adapters/testing/adapted_net.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/strategies.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::adapters::testing {
namespace {

using ::fsdp::checkpoint::ExportModel;
using ::fsdp::checkpoint::LoadModel;
using ::fsdp::checkpoint::LoadModelOptions;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::kStrategies;
using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::MeshOf;
using ::fsdp::testing::NamesIn;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Runs `fn` with MakeInt8Net(seed), sharded, on each of some ranks.
absl::Status OnRanks(int ranks, uint64_t seed, const Options& options,
                     const std::function<absl::Status(Model& model)>& fn) {
  return RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(auto net, MakeInt8Net(seed));
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(std::move(net), mesh, options));
    return fn(model);
  });
}

bool IsWeight(const std::string& name) {
  return absl::EndsWith(name, ".weight") && !IsFactor(name);
}

TEST(QuantizedBaseTest, WeightsBecomeRowsOfBytes) {
  const auto net = MakeNet(1);
  const auto before = ValuesOf(*net);
  Int8Options options = OddBlocks();
  options.kept = {"layers.1.o_proj", "head"};
  ASSERT_OK(QuantizeBase(*net, options));
  for (const auto& item : net->named_parameters()) {
    const at::Tensor& was = before.at(item.key());
    const bool is_int8 = IsWeight(item.key()) &&
                         !absl::StartsWith(item.key(), "layers.1.o_proj") &&
                         !absl::StartsWith(item.key(), "head");
    EXPECT_EQ(item.value().requires_grad(), !is_int8) << item.key();
    const at::Tensor expected =
        is_int8 ? Pack(Int8Rows::Of(was.size(1), 7), was) : was;
    EXPECT_TRUE(at::equal(item.value(), expected)) << item.key();
  }
}

TEST(QuantizedBaseTest, TheHeadOfALanguageModelIsKeptUnlessNamed) {
  torch::nn::Sequential net;
  net->push_back("fc", Linear(2, 3));
  net->push_back("lm_head", Linear(3, 4));
  ASSERT_OK(QuantizeBase(*net));
  EXPECT_EQ(net->named_parameters()["fc.weight"].scalar_type(), at::kByte);
  EXPECT_EQ(net->named_parameters()["lm_head.weight"].scalar_type(),
            at::kFloat);
}

struct Expected {
  std::vector<double> losses;
  Values before;  // of the int8 net
  Values after;   // of the one of numbers
};

absl::StatusOr<Expected> TrainNumbers() {
  FSDP_ASSIGN_OR_RETURN(const auto net, MakeInt8Net(1));
  FSDP_ASSIGN_OR_RETURN(const auto plain, WithNumbers(*net));
  Expected expected;
  expected.before = ValuesOf(*net);
  expected.losses = TrainPlain(*plain);
  expected.after = ValuesOf(*plain);
  return expected;
}

absl::Status ExpectTrained(Model& model, const Expected& expected) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> losses, Train(model));
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i] / expected.losses[i], 1, 1e-6) << i;
  }
  for (const TensorRange& named : model->Ranges()) {
    EXPECT_EQ(named.values.requires_grad(), IsFactor(named.name));
    EXPECT_TRUE(IsFactor(named.name) || !named.values.grad().defined());
  }
  FSDP_ASSIGN_OR_RETURN(const Values after, ValuesOf(model));
  for (const auto& [name, value] : after) {
    const bool is_right =
        IsFactor(name)
            ? at::allclose(value, expected.after.at(name), 1e-4, 1e-5)
            : at::equal(value, expected.before.at(name));
    EXPECT_TRUE(is_right) << name;
  }
  return absl::OkStatus();
}

// With every strategy, and on an SSD, recomputed, called directly, with the
// root freed.
TEST(QuantizedBaseTest, TrainsAsNumbersDoWhateverIsChosen) {
  ASSERT_OK_AND_ASSIGN(const Expected expected, TrainNumbers());
  std::vector<Options> all(4, BlockUnits());
  all[0].offload.parameters = Tier::kSsd;
  all[0].offload.gradients = Tier::kCpu;
  all[0].offload.optimizer = Tier::kSsd;
  all[0].offload.directory = ::testing::TempDir();
  all[1].recompute.units = EveryUnit();
  all[2].transparent = true;
  all[3].reshard_root_after_forward = true;
  for (const ShardingStrategy strategy : kStrategies) {
    all.push_back(BlockUnits());
    all.back().unit.strategy = strategy;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (const int ranks : {1, 2, 3, 5}) {
      EXPECT_OK(
          OnRanks(ranks, 1, all[i],
                  [&](Model& model) { return ExpectTrained(model, expected); }))
          << i << ", " << ranks << " ranks";
    }
  }
}

TEST(QuantizedBaseTest, MixedPrecisionLeavesTheBytesAlone) {
  Options options = BlockUnits();
  options.unit.precision = ComputeIn(at::kBFloat16);
  EXPECT_OK(OnRanks(2, 1, options, [](Model& model) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Values before, ValuesOf(model));
    FSDP_RETURN_IF_ERROR(Train(model).status());
    FSDP_ASSIGN_OR_RETURN(const Values after, ValuesOf(model));
    for (const auto& [name, value] : after) {
      EXPECT_EQ(at::equal(value, before.at(name)), !IsFactor(name)) << name;
      EXPECT_EQ(value.scalar_type(), IsWeight(name) ? at::kByte : at::kFloat);
    }
    return absl::OkStatus();
  }));
}

std::shared_ptr<NetImpl> MakeDeferred(bool is_int8, absl::Status& status) {
  torch::manual_seed(7);
  DeferredInitOptions options;
  options.min_bytes = 0;
  const DeferredInit deferred(options);
  auto net = std::make_shared<NetImpl>();
  if (is_int8) status = QuantizeBase(*net, OddBlocks());
  return net;
}

TEST(QuantizedBaseTest, AModelWithoutMemoryGetsItsValuesAsInt8) {
  absl::Status status;
  const auto numbers = MakeDeferred(/*is_int8=*/false, status);
  ASSERT_OK(Materialize(*numbers));
  ASSERT_OK(QuantizeBase(*numbers, OddBlocks()));
  const Values expected = ValuesOf(*numbers);
  const auto alone = MakeDeferred(/*is_int8=*/true, status);
  ASSERT_OK(status);
  ASSERT_OK(Materialize(*alone));
  for (const auto& [name, value] : ValuesOf(*alone)) {
    EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  }
  const auto shared = MakeDeferred(/*is_int8=*/true, status);
  const auto copy = MakeDeferred(/*is_int8=*/true, status);
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(
        Model model,
        FullyShard(world.rank() == 0 ? shared : copy, mesh, BlockUnits()));
    FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
    for (const auto& [name, value] : values) {
      EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
    }
    return absl::OkStatus();
  }));
}

TEST(QuantizedBaseTest, ADeferredWeightTakesNoMemory) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  torch::nn::Sequential net;
  {
    const DeferredInit deferred;
    net->push_back("fc", Linear(1024, 1024));
    ASSERT_OK(QuantizeBase(*net));
  }
  EXPECT_LT(meter->peak(), 64 << 10);
  EXPECT_EQ(net->named_parameters()["fc.weight"].scalar_type(), at::kByte);
}

TEST(QuantizedBaseTest, MergedWeightsAreNumbersAgain) {
  ASSERT_OK_AND_ASSIGN(const auto net, MakeInt8Net(1));
  ASSERT_OK_AND_ASSIGN(const auto plain, WithNumbers(*net));
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({4, kDim});
  const at::Tensor before = net->forward(x);
  ASSERT_OK(MergeLora(*net));
  ASSERT_OK(MergeLora(*plain));
  const Values expected = ValuesOf(*plain);
  for (const auto& [name, value] : ValuesOf(*net)) {
    EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  }
  EXPECT_TRUE(at::allclose(net->forward(x), before, 1e-4, 1e-5));
}

TEST(QuantizedBaseTest, MergedWeightsHaveTheirDtypeAgain) {
  torch::nn::Sequential net;
  net->push_back("fc", Linear(5, 3));
  net->to(at::kBFloat16);
  ASSERT_OK(QuantizeBase(*net));
  ASSERT_OK(AddLora(*net, OnAllLayers()));
  ASSERT_OK(MergeLora(*net));
  EXPECT_EQ(net->named_parameters()["fc.weight"].scalar_type(), at::kBFloat16);
}

TEST(QuantizedBaseTest, ShardsOfBytesAreNotMerged) {
  EXPECT_OK(OnRanks(2, 1, BlockUnits(), [](Model& model) -> absl::Status {
    EXPECT_THAT(MergeLora(*model),
                Refused("LoadAdapter() into a model whose base is "
                        "not int8"));
    EXPECT_THAT(model->SetTrainable("layers.0.q_proj.weight", true),
                Invalid("stay frozen"));
    return absl::OkStatus();
  }));
}

void ExpectRefused(torch::nn::Module& module, const Int8Options& options,
                   absl::StatusCode code, const std::string& text) {
  EXPECT_THAT(QuantizeBase(module, options), StatusIs(code, HasSubstr(text)));
  for (const auto& item : module.named_parameters()) {
    EXPECT_TRUE(item.value().is_floating_point()) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
}

TEST(QuantizedBaseTest, RefusesWhatCannotBe) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto net = MakeNet(1);
  Int8Options options;
  options.block = 0;
  ExpectRefused(*net, options, invalid, "blocks of 0");
  options = Int8Options();
  options.kept = {"k_proj"};
  ExpectRefused(*net, options, invalid,
                "k_proj: the model has no module of that name");
  options.kept = {"q_proj", "v_proj", "o_proj", "head"};
  ExpectRefused(*net, options, invalid, "no fsdp::adapters::Linear");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    const auto broken = MakeNet(1);
    {
      const at::NoGradGuard no_grad;
      broken->head->weight[1][2].fill_(bad);
    }
    ExpectRefused(*broken, {}, invalid, "the weight of head has a NaN");
  }
}

TEST(QuantizedBaseTest, RefusesAWeightThatTwoModulesHave) {
  torch::nn::Embedding embedding(4, 3);
  Linear head(torch::nn::LinearOptions(3, 4).bias(false));
  head->weight = embedding->weight;
  head->named_parameters()["weight"].set_data(embedding->weight);
  torch::nn::Module net;
  net.register_module("embedding", embedding);
  net.register_module("head", head);
  ExpectRefused(net, {}, absl::StatusCode::kInvalidArgument,
                "the weight of head is also embedding.weight");
  torch::nn::Module parts;
  Linear whole(3, 4);
  torch::nn::Embedding rows(2, 3);
  rows->weight.set_data(whole->weight.detach().narrow(0, 2, 2));
  parts.register_module("rows", rows);
  parts.register_module("whole", whole);
  ExpectRefused(parts, {}, absl::StatusCode::kInvalidArgument,
                "the weight of whole is also rows.weight");
  // One layer in two places has one weight.
  torch::nn::Module twice;
  Linear layer(3, 4);
  twice.register_module("a", layer);
  twice.register_module("b", layer);
  ASSERT_OK(QuantizeBase(twice));
  EXPECT_EQ(layer->weight.scalar_type(), at::kByte);
}

TEST(QuantizedBaseTest, RefusesASecondTimeAndTheWrongOrder) {
  const auto net = MakeNet(1);
  ASSERT_OK(QuantizeBase(*net));
  EXPECT_THAT(QuantizeBase(*net), Refused("already"));
  LoraConfig config = OnAllLayers();
  config.trained_whole = {"head"};
  EXPECT_THAT(AddLora(*net, config),
              Invalid("training whole head, whose weight is int8"));
  const auto adapted = MakeNet(1);
  ASSERT_OK(AddLora(*adapted, OnAllLayers()));
  EXPECT_THAT(QuantizeBase(*adapted), Refused("before AddLora()"));
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(MakeNet(1), mesh, BlockUnits()));
    EXPECT_THAT(QuantizeBase(*model), Refused("before FullyShard()"));
    return absl::OkStatus();
  }));
}

// A file of MakeNet(1) in `dtype`.
std::string BaseFile(const std::string& folder, c10::ScalarType dtype) {
  const auto net = MakeNet(1);
  net->to(dtype);
  std::string path = absl::StrCat(folder, "/", c10::toString(dtype));
  EXPECT_OK(ExportModel(path, *net));
  return path;
}

// What QuantizeBase() makes of what is in that file.
Values Int8Of(c10::ScalarType dtype) {
  const auto net = MakeNet(1);
  net->to(dtype);
  EXPECT_OK(QuantizeBase(*net, OddBlocks()));
  return ValuesOf(*net);
}

LoadModelOptions ForBaseOf(const torch::nn::Module& module) {
  LoadModelOptions options;
  options.mapping = OfBaseModel(module);
  return options;
}

void ExpectBase(const Values& values, const Values& expected) {
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(at::equal(values.at(name).to(value.scalar_type()), value))
        << name;
  }
}

TEST(Int8FilesTest, EveryNumberOfRanksQuantisesWhatItReads) {
  const std::string folder = EmptyFolder("int8_base");
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const std::string path = BaseFile(folder, dtype);
    const Values expected = Int8Of(dtype);
    for (const bool is_away : {false, true}) {
      Options options = BlockUnits();
      if (is_away) {
        options.offload.parameters = Tier::kSsd;
        options.offload.directory = ::testing::TempDir();
      }
      for (const int ranks : {1, 2, 3, 5}) {
        const auto run = [&](Model& model) -> absl::Status {
          FSDP_RETURN_IF_ERROR(LoadModel(path, *model, ForBaseOf(*model)));
          FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
          ExpectBase(values, expected);
          return absl::OkStatus();
        };
        EXPECT_OK(OnRanks(ranks, 2, options, run)) << dtype << ", " << ranks;
      }
    }
  }
}

// On all ranks, whichever has read it.
absl::Status LoadBroken(const std::string& path) {
  return OnRanks(3, 2, BlockUnits(), [&](Model& model) -> absl::Status {
    absl::Status loaded = LoadModel(path, *model, ForBaseOf(*model));
    EXPECT_EQ(loaded.code(), absl::StatusCode::kInvalidArgument) << loaded;
    return loaded;
  });
}

TEST(Int8FilesTest, NumbersThatAreNotFiniteAreRefusedOnAllRanks) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    const auto net = MakeNet(1);
    {
      const c10::NoGradGuard no_grad;
      net->named_parameters()["layers.1.o_proj.weight"][4][23].fill_(bad);
    }
    const std::string path = EmptyFolder("int8_nan") + "/base";
    ASSERT_OK(ExportModel(path, *net));
    EXPECT_THAT(LoadBroken(path),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("layers.1.o_proj.weight, rows "),
                               HasSubstr("a NaN or an infinity"))));
  }
}

TEST(Int8FilesTest, BytesAndOtherShapesAreNotTakenForNumbers) {
  const std::string folder = EmptyFolder("int8_bytes");
  ASSERT_OK_AND_ASSIGN(const auto int8, MakeInt8Net(1));
  checkpoint::ExportOptions options;
  options.names = [](const std::string& name) -> std::optional<std::string> {
    if (IsFactor(name)) return std::nullopt;
    return name;
  };
  ASSERT_OK(ExportModel(folder + "/int8", *int8, options));
  EXPECT_THAT(LoadBroken(folder + "/int8"),
              Invalid("head.weight: dtype U8 instead of a "
                      "floating-point one"));
  // And a model of numbers takes no bytes.
  EXPECT_THAT(LoadModel(folder + "/int8", *MakeNet(2)),
              Invalid("head.weight: dtype U8"));
  const auto narrow = MakeNet(1);
  narrow->named_parameters()["head.weight"].set_data(at::zeros({5, 15}));
  ASSERT_OK(ExportModel(folder + "/narrow", *narrow));
  EXPECT_THAT(LoadBroken(folder + "/narrow"),
              Invalid("head.weight: shape [5, 15] instead of "
                      "[5, 16]"));
}

TEST(Int8FilesTest, AnAdapterDoesNotTellWhatItsBaseIs) {
  const std::string root = EmptyFolder("int8_adapter");
  EXPECT_OK(OnRanks(3, 1, BlockUnits(), [&](Model& model) -> absl::Status {
    FSDP_RETURN_IF_ERROR(SaveAdapter(root + "/adapter", *model, OnAllLayers()));
    EXPECT_THAT(ExportMerged(root + "/merged", *model), Refused("int8 base"));
    return absl::OkStatus();
  }));
  EXPECT_THAT(NamesIn(root), ::testing::ElementsAre("adapter"));
  const auto numbers = MakeNet(1);
  ASSERT_OK(AddLora(*numbers, OnAllLayers()));
  ASSERT_OK(LoadAdapter(root + "/adapter", *numbers, OnAllLayers()));
  ASSERT_OK_AND_ASSIGN(const auto int8, MakeInt8Net(1));
  const Values expected = ValuesOf(*int8);
  for (const auto& [name, value] : ValuesOf(*numbers)) {
    if (!IsFactor(name)) continue;
    EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  }
  ASSERT_OK(ExportMerged(root + "/merged", *numbers));
}

// Saved at one number of ranks, loaded at others into a net of other values.
TEST(Int8FilesTest, CheckpointsHaveTheBytes) {
  const std::string root = EmptyFolder("int8_checkpoints");
  std::vector<double> unbroken;
  Values saved;
  const auto open = [&root](Model& model) {
    return checkpoint::Checkpointer::Open(root + "/run",
                                          Unowned(model->communicator()));
  };
  EXPECT_OK(OnRanks(2, 1, BlockUnits(), [&](Model& model) -> absl::Status {
    FSDP_RETURN_IF_ERROR(Train(model).status());
    FSDP_ASSIGN_OR_RETURN(auto checkpoints, open(model));
    checkpoint::TrainingRun run;
    run.model = model.get();
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, run));
    FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
    FSDP_ASSIGN_OR_RETURN(const std::vector<double> losses, Train(model));
    if (model->communicator().rank() == 0) {
      saved = values;
      unbroken = losses;
    }
    return absl::OkStatus();
  }));
  for (const int ranks : {1, 2, 3, 5}) {
    const auto go_on = [&](Model& model) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto checkpoints, open(model));
      checkpoint::TrainingRun run;
      run.model = model.get();
      FSDP_ASSIGN_OR_RETURN(const auto step, checkpoints->LoadLatest(run));
      EXPECT_EQ(step, 1);
      FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
      ExpectBase(values, saved);
      FSDP_ASSIGN_OR_RETURN(const std::vector<double> losses, Train(model));
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(losses[i] / unbroken[i], 1, 1e-6) << i;
      }
      return absl::OkStatus();
    };
    EXPECT_OK(OnRanks(ranks, 2, BlockUnits(), go_on)) << ranks;
  }
}

}  // namespace
}  // namespace fsdp::adapters::testing
