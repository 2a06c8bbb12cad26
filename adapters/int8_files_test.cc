// An int8 base and files: loaded from numbers, saved and loaded as bytes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "adapters/lora.h"
#include "adapters/peft_files.h"
#include "adapters/quantized_base.h"
#include "adapters/testing/adapted_net.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/strategies.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::adapters::testing::BlockUnits;
using ::fsdp::adapters::testing::MakeInt8Net;
using ::fsdp::adapters::testing::MakeNet;
using ::fsdp::adapters::testing::Model;
using ::fsdp::adapters::testing::NetImpl;
using ::fsdp::adapters::testing::OddBlocks;
using ::fsdp::adapters::testing::OnAllLayers;
using ::fsdp::adapters::testing::ShardInt8Net;
using ::fsdp::adapters::testing::Train;
using ::fsdp::adapters::testing::Values;
using ::fsdp::adapters::testing::ValuesOf;
using ::fsdp::checkpoint::ExportFile;
using ::fsdp::checkpoint::LoadModel;
using ::fsdp::checkpoint::LoadModelOptions;
using ::fsdp::checkpoint::testing::EmptyFolder;
using ::fsdp::checkpoint::testing::NamesIn;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::MeshOf;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file of MakeNet(1) in `dtype`.
std::string BaseFile(const std::string& folder, c10::ScalarType dtype) {
  const auto net = MakeNet(1);
  net->to(dtype);
  const std::string path = folder + "/base.safetensors";
  EXPECT_OK(ExportFile(path, *net));
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
        const auto run = [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
          FSDP_ASSIGN_OR_RETURN(Model model, ShardInt8Net(2, mesh, options));
          FSDP_RETURN_IF_ERROR(LoadModel(path, *model, ForBaseOf(*model)));
          FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
          ExpectBase(values, expected);
          return absl::OkStatus();
        };
        EXPECT_OK(RunAllRanks(ranks, run)) << dtype << ", " << ranks;
      }
    }
  }
}

TEST(Int8FilesTest, AModelThatIsNotShardedQuantisesWhatItReads) {
  const std::string path = BaseFile(EmptyFolder("int8_alone"), at::kFloat);
  DeferredInitOptions options;
  options.min_bytes = 0;
  std::shared_ptr<NetImpl> net;
  {
    const DeferredInit deferred(options);
    net = std::make_shared<NetImpl>();
    ASSERT_OK(QuantizeBase(*net, OddBlocks()));
    ASSERT_OK(AddLora(*net, OnAllLayers()));
  }
  ASSERT_OK(LoadModel(path, *net, ForBaseOf(*net)));
  ExpectBase(ValuesOf(*net), Int8Of(at::kFloat));
}

// On all ranks, whichever has read it.
absl::Status LoadBroken(const std::string& path) {
  return RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(Model model, ShardInt8Net(2, mesh));
    const absl::Status loaded = LoadModel(path, *model, ForBaseOf(*model));
    EXPECT_EQ(loaded.code(), absl::StatusCode::kInvalidArgument) << loaded;
    return loaded;
  });
}

TEST(Int8FilesTest, NumbersThatAreNotFiniteAreRefusedOnAllRanks) {
  const std::string path = EmptyFolder("int8_nan") + "/base.safetensors";
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    const auto net = MakeNet(1);
    {
      const c10::NoGradGuard no_grad;
      net->named_parameters()["layers.1.o_proj.weight"][4][23].fill_(bad);
    }
    ASSERT_OK(ExportFile(path, *net));
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
  ASSERT_OK(ExportFile(folder + "/int8.safetensors", *int8, options));
  EXPECT_THAT(LoadBroken(folder + "/int8.safetensors"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("head.weight: dtype U8 instead of a "
                                 "floating-point one")));
  // And a model of numbers takes no bytes.
  EXPECT_THAT(LoadModel(folder + "/int8.safetensors", *MakeNet(2)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("head.weight: dtype U8")));
  const auto narrow = MakeNet(1);
  narrow->named_parameters()["head.weight"].set_data(at::zeros({5, 15}));
  ASSERT_OK(ExportFile(folder + "/narrow.safetensors", *narrow));
  EXPECT_THAT(LoadBroken(folder + "/narrow.safetensors"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("head.weight: shape [5, 15] instead of "
                                 "[5, 16]")));
}

TEST(Int8FilesTest, AnAdapterDoesNotTellWhatItsBaseIs) {
  const std::string root = EmptyFolder("int8_adapter");
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(Model model, ShardInt8Net(1, mesh));
    FSDP_RETURN_IF_ERROR(SaveAdapter(root + "/adapter", *model, OnAllLayers()));
    EXPECT_THAT(ExportMerged(root + "/merged", *model),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("int8 base")));
    return absl::OkStatus();
  }));
  EXPECT_THAT(NamesIn(root), ElementsAre("adapter"));
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
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
    FSDP_ASSIGN_OR_RETURN(Model model, ShardInt8Net(1, mesh));
    FSDP_RETURN_IF_ERROR(Train(model).status());
    FSDP_ASSIGN_OR_RETURN(auto checkpoints, checkpoint::Checkpointer::Open(
                                                root + "/run", Unowned(world)));
    checkpoint::TrainingRun run;
    run.model = model.get();
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, run));
    FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
    FSDP_ASSIGN_OR_RETURN(const std::vector<double> losses, Train(model));
    if (world.rank() == 0) saved = values;
    if (world.rank() == 0) unbroken = losses;
    return absl::OkStatus();
  }));
  for (const int ranks : {1, 2, 3, 5}) {
    const auto go_on = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(world));
      FSDP_ASSIGN_OR_RETURN(Model model, ShardInt8Net(2, mesh));
      FSDP_ASSIGN_OR_RETURN(
          auto checkpoints,
          checkpoint::Checkpointer::Open(root + "/run", Unowned(world)));
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
    EXPECT_OK(RunAllRanks(ranks, go_on)) << ranks;
  }
}

}  // namespace
}  // namespace fsdp::adapters
