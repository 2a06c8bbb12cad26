// Loads models as other programs leave them in folders.

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"
#include "checkpoint/testing/sample_tensors.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint {
namespace {

using Code = absl::StatusCode;
using ::fsdp::checkpoint::testing::Floats;
using ::fsdp::checkpoint::testing::ModelFiles;
using ::fsdp::checkpoint::testing::SampleTensor;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NamesIn;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void Write(const std::string& path, const std::vector<SampleTensor>& tensors) {
  std::ofstream(path, std::ios::binary)
      << ModelFiles(tensors).at("model.safetensors");
}

// --- Eight bits and their scale ---------------------------------------------

constexpr int64_t kRows = 130;
constexpr int64_t kColumns = 259;

// Bytes of E4M3, and the numbers that they are.
constexpr std::pair<char, float> kEightBits[] = {
    {'\x38', 1}, {'\x40', 2}, {'\x3c', 1.5}, {'\xb8', -1}, {'\x30', 0.5}};

struct Scaling {
  std::string name;  // added to "weight"
  std::vector<int64_t> shape;
  // Returns the place of the factor of an element.
  int64_t (*factor)(int64_t row, int64_t column);
};

const Scaling kScalings[] = {
    {"_scale", {}, [](int64_t, int64_t) -> int64_t { return 0; }},
    {"_scale", {1}, [](int64_t, int64_t) -> int64_t { return 0; }},
    {"_scale_inv", {1, 1}, [](int64_t, int64_t) -> int64_t { return 0; }},
    {"_scale", {kRows}, [](int64_t row, int64_t) { return row; }},
    {"_scale", {kRows, 1}, [](int64_t row, int64_t) { return row; }},
    {"_scale_inv", {2, 3}, [](int64_t row, int64_t column) {
       return row / 128 * 3 + column / 128;
     }}};

// Writes the file of a Linear and returns its values, computed one by one.
at::Tensor WriteScaled(const std::string& path, const Scaling& scaling) {
  SampleTensor weight{{"weight", Dtype::kF8E4M3, {kRows, kColumns}}, ""};
  int64_t factors = 1;
  for (const int64_t size : scaling.shape) factors *= size;
  std::vector<float> scale;
  for (int64_t i = 0; i < factors; ++i) {
    scale.push_back(0.005F * static_cast<float>(i + 1));
  }
  at::Tensor values = at::zeros({kRows, kColumns});
  auto value = values.accessor<float, 2>();
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) {
      const auto& [byte, number] = kEightBits[(row * 3 + column) % 5];
      weight.bytes += byte;
      value[row][column] = number * scale[scaling.factor(row, column)];
    }
  }
  Write(path, {weight, Floats("weight" + scaling.name, scaling.shape, scale)});
  return values;
}

std::shared_ptr<torch::nn::LinearImpl> Layer() {
  return std::make_shared<torch::nn::LinearImpl>(
      torch::nn::LinearOptions(kColumns, kRows).bias(false));
}

TEST(ScaledModelsTest, EightBitsAreMultipliedByWhatIsBesideThem) {
  const std::string path = EmptyFolder("scaled") + "/model.safetensors";
  for (const Scaling& scaling : kScalings) {
    const at::Tensor expected = WriteScaled(path, scaling);
    for (const bool strict : {true, false}) {
      LoadModelOptions options;
      options.strict = strict;
      const auto plain = Layer();
      ASSERT_OK(LoadModel(path, *plain, options));
      EXPECT_TRUE(at::equal(plain->weight, expected)) << scaling.name;
      plain->to(c10::kBFloat16);
      ASSERT_OK(LoadModel(path, *plain, options));
      EXPECT_TRUE(at::equal(plain->weight, expected.to(c10::kBFloat16)));
      EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(Layer(), Unowned(world)));
        FSDP_RETURN_IF_ERROR(LoadModel(path, *model, options));
        FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
        if (at::equal(dict["weight"], expected)) return absl::OkStatus();
        return absl::InternalError(absl::StrCat("sharded, ", scaling.name));
      }));
    }
    // A conversion of one's own may transpose, as for Conv1D.
    LoadModelOptions options;
    options.mapping = [](const std::string& name) {
      TensorRecipe recipe = TensorRecipe::Of(name);
      recipe.pieces[0].transposed = true;
      recipe.conversion = {{kColumns, kRows}, [](const at::Tensor& rows) {
                             return absl::StatusOr<at::Tensor>(rows * 2);
                           }};
      return std::optional<TensorRecipe>(recipe);
    };
    const auto turned = std::make_shared<torch::nn::LinearImpl>(
        torch::nn::LinearOptions(kRows, kColumns).bias(false));
    ASSERT_OK(LoadModel(path, *turned, options));
    EXPECT_TRUE(at::equal(turned->weight, expected.t() * 2));
  }
}

TEST(ScaledModelsTest, EightBitsWithoutAKnownScaleAreRefused) {
  const std::string path = EmptyFolder("unscaled") + "/model.safetensors";
  const SampleTensor weight{{"weight", Dtype::kF8E4M3, {kRows, kColumns}},
                            std::string(kRows * kColumns, '\x38')};
  LoadModelOptions options;
  options.strict = false;
  const auto layer = Layer();
  const at::Tensor before = layer->weight.detach().clone();
  Write(path, {weight});
  EXPECT_THAT(LoadModel(path, *layer, options),
              StatusIs(Code::kInvalidArgument,
                       HasSubstr("neither weight_scale nor weight_scale_inv")));
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{3}, {3, 5}, {1, kColumns}, {2}}) {
    int64_t factors = 1;
    for (const int64_t size : shape) factors *= size;
    Write(path, {weight, Floats("weight_scale", shape,
                                std::vector<float>(factors, 0.5F))});
    EXPECT_THAT(LoadModel(path, *layer, options),
                StatusIs(Code::kInvalidArgument,
                         AllOf(HasSubstr("weight_scale, F32["),
                               HasSubstr("block of 128 x 128"))));
  }
  EXPECT_TRUE(at::equal(layer->weight, before));
  // A module of the file's own dtype needs none.
  layer->to(at::kFloat8_e4m3fn);
  Write(path, {weight});
  ASSERT_OK(LoadModel(path, *layer));
  EXPECT_TRUE(
      at::equal(layer->weight.to(c10::kFloat), at::full({kRows, kColumns}, 1)));
}

// --- What is there twice ----------------------------------------------------

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embed = register_parameter("embed", at::zeros({3, 2}));
    register_parameter("head", embed);
  }
  at::Tensor forward(const at::Tensor& x) { return x * embed.sum(); }
  at::Tensor embed;
};

TEST(TwiceTest, ATiedParameterMayHaveTwoNamesIfTheyAreEqual) {
  const std::string path = EmptyFolder("twice") + "/model.safetensors";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {1, 2, 3, 4, 5, nan};
  for (const int different : {-1, 0, 5}) {
    std::vector<float> other = values;
    if (different >= 0) other[different] = 9;
    Write(path,
          {Floats("embed", {3, 2}, values), Floats("head", {3, 2}, other)});
    const auto load = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(std::make_shared<TiedImpl>(), Unowned(world)));
      absl::Status loaded = LoadModel(path, *model);
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      const double first = dict["embed"].flatten()[0].item<double>();
      if (first == (loaded.ok() ? 1 : 0)) return loaded;
      return absl::InternalError(absl::StrCat("filled with ", first));
    };
    for (const int ranks : {1, 3}) {
      const absl::Status loaded = RunAllRanks(ranks, load);
      if (different < 0) {
        EXPECT_OK(loaded);
      } else {
        EXPECT_THAT(loaded, StatusIs(Code::kInvalidArgument,
                                     AllOf(HasSubstr(path),
                                           HasSubstr("head differs from embed"),
                                           HasSubstr("tie_word_embeddings"))));
      }
    }
  }
  Write(path, {Floats("embed", {3, 2}, values), Floats("head", {2}, {1, 2})});
  TiedImpl tied;
  EXPECT_THAT(LoadModel(path, tied),
              StatusIs(Code::kInvalidArgument, HasSubstr("head differs from")));
}

void WriteIndex(const std::string& path, absl::string_view weight_map) {
  std::ofstream(path) << "{\"weight_map\": {" << weight_map << "}}";
}

float LoadedEmbed(const std::string& folder) {
  TiedImpl tied;
  const absl::Status loaded = LoadModel(folder, tied);
  EXPECT_OK(loaded) << folder;
  return tied.embed.flatten()[5].item<float>();
}

SampleTensor Embed(float value) {
  return Floats("embed", {3, 2}, std::vector<float>(6, value));
}

TEST(TwiceTest, MistralsOtherModelIsLeftAlone) {
  const std::string one = EmptyFolder("consolidated_one");
  Write(one + "/consolidated.safetensors", {Embed(1)});
  EXPECT_EQ(LoadedEmbed(one), 1);
  Write(one + "/model.safetensors", {Embed(2)});
  EXPECT_EQ(LoadedEmbed(one), 2);
  WriteIndex(one + "/consolidated.safetensors.index.json",
             R"("embed": "consolidated.safetensors")");
  EXPECT_EQ(LoadedEmbed(one), 2);
  const std::string several = EmptyFolder("consolidated_several");
  Write(several + "/consolidated.safetensors", {Embed(1)});
  Write(several + "/model-00001-of-00001.safetensors", {Embed(3)});
  EXPECT_EQ(LoadedEmbed(several), 3);
  for (const char* stem : {"consolidated", "model"}) {
    WriteIndex(absl::StrCat(several, "/", stem, ".safetensors.index.json"),
               R"("embed": "model-00001-of-00001.safetensors")");
    EXPECT_EQ(LoadedEmbed(several), 3);
  }
}

TEST(OthersTest, FoldersOfPyTorchSayHowToConvert) {
  TiedImpl tied;
  for (const auto& [file, how] :
       std::vector<std::pair<std::string, std::string>>{
           {"pytorch_model.bin", "`tools/interop/dcp.py model`"},
           {".metadata", "`tools/interop/dcp.py import`"}}) {
    const std::string folder = EmptyFolder("of_pytorch");
    std::ofstream(absl::StrCat(folder, "/", file)) << "PK";
    EXPECT_THAT(LoadModel(folder, tied),
                StatusIs(Code::kNotFound, HasSubstr(how)));
  }
}

// Exports some tensors, by other names.

class ExportNamesTest : public ::testing::TestWithParam<int> {
 protected:
  // Exports a net with the values of seed 1 by as many ranks as the test has.
  absl::Status Export(const ExportOptions& options) {
    return comm::testing::RunAllRanks(
        GetParam(), [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto model,
                                FullyShard(MakeNet(5, 2, /*seed=*/1),
                                           fsdp::testing::Unowned(world),
                                           fsdp::testing::BlockUnits()));
          return ExportModel(root_ + "/m", *model, options);
        });
  }

  const std::string root_ =
      EmptyFolder(absl::StrCat("export_names_", GetParam()));
};

INSTANTIATE_TEST_SUITE_P(Ranks, ExportNamesTest, ::testing::Values(1, 2, 3));

std::optional<std::string> NameOfSome(const std::string& name) {
  if (!absl::StrContains(name, "fc.")) return std::nullopt;
  return "other." + name;
}

TEST_P(ExportNamesTest, SomeTensorsHaveOtherNamesAndTheRestIsLeftOut) {
  ExportOptions options;
  options.stem = "part";
  options.names = NameOfSome;
  ASSERT_OK(Export(options));
  EXPECT_THAT(NamesIn(root_ + "/m"), ElementsAre("part.safetensors"));
  const auto loaded = MakeNet(5, 2, /*seed=*/2);
  LoadModelOptions load;
  load.mapping = [](const std::string& name) -> std::optional<TensorRecipe> {
    const auto other = NameOfSome(name);
    if (!other.has_value()) return std::nullopt;
    return TensorRecipe::Of(*other);
  };
  ASSERT_OK(LoadModel(root_ + "/m/part.safetensors", *loaded, load));
  const auto exported = MakeNet(5, 2, /*seed=*/1)->named_parameters();
  const auto others = MakeNet(5, 2, /*seed=*/2)->named_parameters();
  for (const auto& item : loaded->named_parameters()) {
    const bool is_exported = NameOfSome(item.key()).has_value();
    const auto& expected = is_exported ? exported : others;
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  }
}

TEST_P(ExportNamesTest, WhatCannotBeIsRefused) {
  ExportOptions options;
  options.names = [](const std::string&) { return "same"; };
  EXPECT_THAT(Export(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("two tensors of the model have the name")));
  options.names = nullptr;
  options.stem = "../model";
  EXPECT_THAT(Export(options), StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("../model")));
  EXPECT_THAT(NamesIn(root_), ::testing::IsEmpty());
}

}  // namespace
}  // namespace fsdp::checkpoint
