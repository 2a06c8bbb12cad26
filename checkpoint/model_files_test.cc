#include "checkpoint/model_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/real_files.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::CheckEqual;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::ForwardingFileSystem;
using ::fsdp::testing::LayerUnits;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::MakeTransformer;
using ::fsdp::testing::NamesIn;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::fsdp::testing::Values;
using ::fsdp::testing::ValuesOf;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

namespace fs = std::filesystem;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;

template <typename Model>
absl::StatusOr<Values> Gather(Model& model) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
  return ValuesOf(dict);
}

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardedNet(
    Communicator& world, int seed, int num_blocks = kBlocks) {
  return FullyShard(MakeNet(kDim, num_blocks, seed), Unowned(world),
                    BlockUnits());
}

// Loads `path` into what `make` shards on each of the ranks, and compares.
template <typename Make>
absl::Status LoadOn(int ranks, const std::string& path, const Values& expected,
                    const Make& make, const LoadModelOptions& options = {}) {
  return RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, make(world));
    FSDP_RETURN_IF_ERROR(LoadModel(path, *model, options));
    FSDP_ASSIGN_OR_RETURN(const Values actual, Gather(model));
    return CheckEqual(actual, expected);
  });
}

// A net of other values than those that are loaded.
absl::StatusOr<FullyShardedDataParallel<NetImpl>> OtherNet(
    Communicator& world) {
  return ShardedNet(world, /*seed=*/2);
}

absl::Status ExportNet(int ranks, const std::string& path, int seed,
                       const ExportOptions& options = {}) {
  return RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardedNet(world, seed));
    return ExportModel(path, *model, options);
  });
}

class RanksTest : public ::testing::TestWithParam<int> {};

TEST_P(RanksTest, WhatWasExportedComesBackToTheBit) {
  const std::string root =
      EmptyFolder(absl::StrCat("model_files_bits_", GetParam()));
  ExportOptions options;
  options.texts["config.json"] = "{}";
  ASSERT_OK(ExportNet(GetParam(), root + "/m", /*seed=*/1, options));
  EXPECT_THAT(NamesIn(root), ElementsAre("m"));
  EXPECT_THAT(NamesIn(root + "/m"),
              ElementsAre("config.json", "model.safetensors"));
  EXPECT_EQ(ReadWholeFile(root + "/m/config.json"), "{}");
  const Values expected = ValuesOf(*MakeNet(kDim, kBlocks, /*seed=*/1));
  for (const int ranks : {1, 2, 3}) {
    for (const char* path : {"/m", "/m/model.safetensors"}) {
      EXPECT_OK(LoadOn(ranks, root + path, expected, OtherNet))
          << ranks << path;
    }
  }
  const auto plain = MakeNet(kDim, kBlocks, /*seed=*/2);
  EXPECT_OK(LoadModel(root + "/m", *plain));
  EXPECT_OK(CheckEqual(ValuesOf(*plain), expected));
}

INSTANTIATE_TEST_SUITE_P(All, RanksTest, ::testing::Values(1, 2, 3));

TEST(ModelFilesTest, FilesDoNotDependOnTheRanks) {
  const std::string root = EmptyFolder("model_files_alike");
  for (const int ranks : {1, 2, 3}) {
    ASSERT_OK(ExportNet(ranks, absl::StrCat(root, "/", ranks), /*seed=*/1));
  }
  // Ranks that have all of it export it, and so does a program without ranks.
  ASSERT_OK(RunAllRanks(2, [&](Communicator& world) {
    ExportOptions options;
    options.ranks = &world;
    // The values of rank 0 count.
    return ExportModel(root + "/whole",
                       *MakeNet(kDim, kBlocks, 1 + world.rank()), options);
  }));
  ASSERT_OK(ExportModel(root + "/plain", *MakeNet(kDim, kBlocks, 1)));
  const std::string file = ReadWholeFile(root + "/1/model.safetensors");
  for (const char* other : {"/2", "/3", "/whole", "/plain"}) {
    EXPECT_TRUE(ReadWholeFile(root + other + "/model.safetensors") == file)
        << other;
  }
}

TEST(ModelFilesTest, CastOnTheWay) {
  const std::string root = EmptyFolder("model_files_cast");
  ExportOptions options;
  options.dtype = c10::kBFloat16;
  ASSERT_OK(ExportNet(2, root + "/m", /*seed=*/1, options));
  EXPECT_THAT(ReadWholeFile(root + "/m/model.safetensors"),
              AllOf(HasSubstr("\"BF16\""), Not(HasSubstr("\"F32\""))));
  Values expected = ValuesOf(*MakeNet(kDim, kBlocks, /*seed=*/1));
  for (auto& [name, value] : expected) {
    value = value.to(c10::kBFloat16).to(c10::kFloat);
  }
  EXPECT_OK(LoadOn(3, root + "/m/", expected, OtherNet));
}

// Tells the fake device where the host puts what it reads.
class NotedReads : public ForwardingFileSystem {
 public:
  NotedReads() : ForwardingFileSystem(RealFileSystem()) {}

 private:
  void BeforeFilling(absl::Span<char> out) override {
    FakeDevice::HostWrite(
        at::from_blob(out.data(), {static_cast<int64_t>(out.size())},
                      at::TensorOptions(at::kByte)),
        "a read");
  }
};

// The file is larger than the memory that it is read into.
TEST(ModelFilesTest, ADeviceCopiesAndCastsWhatIsReadWithoutAWait) {
  FakeDevice::Register();
  const std::string root = EmptyFolder("model_files_device");
  torch::nn::Linear saved(3072, 4096);
  ExportOptions options;
  options.dtype = c10::kBFloat16;
  ASSERT_OK(ExportModel(root + "/m", *saved, options));
  torch::nn::Linear loaded(3072, 4096);
  FakeDevice::Move(loaded->parameters());
  NotedReads files;
  LoadModelOptions load;
  load.files = &files;
  FakeDevice::Reset();
  ASSERT_OK(LoadModel(root + "/m", *loaded, load));
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  for (const auto& [name, value] : ValuesOf(*saved)) {
    EXPECT_TRUE(at::equal(value.to(c10::kBFloat16).to(c10::kFloat),
                          ValuesOf(*loaded)[name].cpu()))
        << name;
  }
}

TEST(ModelFilesTest, NothingIsCastToWhatHasNoFractions) {
  const std::string root = EmptyFolder("model_files_no_fractions");
  for (const c10::ScalarType dtype :
       {c10::kInt, c10::kBool, c10::kComplexFloat}) {
    ExportOptions options;
    options.dtype = dtype;
    EXPECT_THAT(ExportNet(2, root + "/m", /*seed=*/1, options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("name a floating-point dtype")));
  }
}

TEST(ModelFilesTest, SeveralFilesLinksAndAnIndex) {
  const std::string root = EmptyFolder("model_files_several");
  ExportOptions options;
  options.max_file_bytes = 200;
  ASSERT_OK(ExportNet(3, root + "/m", /*seed=*/1, options));
  ASSERT_THAT(NamesIn(root + "/m"),
              ::testing::Contains("model.safetensors.index.json"));
  // The cache of Hugging Face's hub has links, too.
  fs::create_directory(root + "/cache");
  for (const std::string& name : NamesIn(root + "/m")) {
    fs::create_symlink(absl::StrCat("../m/", name),
                       absl::StrCat(root, "/cache/", name));
  }
  fs::create_symlink("cache", root + "/link");
  const Values expected = ValuesOf(*MakeNet(kDim, kBlocks, /*seed=*/1));
  for (const char* path :
       {"/m", "/m/model.safetensors.index.json", "/cache", "/link"}) {
    const auto plain = MakeNet(kDim, kBlocks, /*seed=*/2);
    EXPECT_OK(LoadModel(root + path, *plain)) << path;
    EXPECT_OK(CheckEqual(ValuesOf(*plain), expected)) << path;
  }
}

// Has q, k, v and a projection as GPT-2's Conv1D has them.
struct SplitImpl : torch::nn::Module {
  SplitImpl() {
    for (const char* name : {"q", "k", "v", "c"}) {
      register_module(name, torch::nn::Linear(kDim, kDim));
    }
  }
};

// Has one fused projection, transposed, and a Linear.
struct FusedImpl : torch::nn::Module {
  FusedImpl()
      : qkv(register_module("qkv", torch::nn::Linear(kDim, 3 * kDim))),
        conv(register_module("conv", torch::nn::Linear(kDim, kDim))),
        own(register_parameter("own", at::full({3}, 7.0))) {}
  at::Tensor forward(const at::Tensor& x) {
    return conv->forward(qkv->forward(x).chunk(3, -1)[0]) + own.sum();
  }

  torch::nn::Linear qkv;
  torch::nn::Linear conv;
  at::Tensor own;
};

std::optional<TensorRecipe> FuseOf(const std::string& name) {
  if (name == "own") return std::nullopt;
  TensorRecipe recipe;
  if (name == "conv.weight") {
    recipe.pieces = {{"c.weight", std::nullopt, /*transposed=*/true}};
  } else if (name == "conv.bias") {
    recipe.pieces = {{"q.bias", {{0, 2}}}, {"c.bias", {{2, kDim}}}};
  } else {
    for (const char* part : {"q", "k", "v"}) {
      recipe.pieces.push_back({absl::StrReplaceAll(name, {{"qkv", part}}),
                               std::nullopt,
                               /*transposed=*/false});
    }
  }
  return recipe;
}

TEST(ModelFilesTest, AMappingFusesTransposesAndCuts) {
  const std::string root = EmptyFolder("model_files_mapping");
  SplitImpl split;
  FillParameters(split, /*seed=*/3);
  ASSERT_OK(ExportModel(root + "/m", split));
  Values from = ValuesOf(split);
  const Values expected = {
      {"qkv.weight",
       at::cat({from["q.weight"], from["k.weight"], from["v.weight"]})},
      {"qkv.bias", at::cat({from["q.bias"], from["k.bias"], from["v.bias"]})},
      {"conv.weight", from["c.weight"].t().contiguous()},
      {"conv.bias", at::cat({from["q.bias"].slice(0, 0, 2),
                             from["c.bias"].slice(0, 2, kDim)})},
      {"own", at::full({3}, 7.0)}};
  LoadModelOptions options;
  options.mapping = FuseOf;
  const auto make = [](Communicator& world) {
    return FullyShard(std::make_shared<FusedImpl>(), Unowned(world),
                      BlockUnits());
  };
  for (const int ranks : {1, 2, 3}) {
    EXPECT_OK(LoadOn(ranks, root + "/m", expected, make, options)) << ranks;
  }
  FusedImpl plain;
  EXPECT_OK(LoadModel(root + "/m", plain, options));
  EXPECT_OK(CheckEqual(ValuesOf(plain), expected));
}

TEST(ModelFilesTest, NoFiniteValueBecomesInfinite) {
  const std::string root = EmptyFolder("model_files_infinite");
  SplitImpl split;
  const at::Tensor weight = split.named_parameters()["c.weight"].detach();
  weight[kDim - 1][0] = std::numeric_limits<float>::infinity();
  ASSERT_OK(ExportModel(root + "/inf", split));
  weight[kDim - 1][0] = 70000;
  ASSERT_OK(ExportModel(root + "/m", split));
  RowConversion as_they_are;
  as_they_are.sizes = {kDim, kDim};
  as_they_are.convert = [](const at::Tensor& rows) { return rows; };
  // The weight is loaded as it is, put together, and converted.
  for (const int way : {0, 1, 2}) {
    LoadModelOptions options;
    options.mapping = [&](const std::string& name) {
      auto recipe = FuseOf(name);
      if (name == "conv.weight" && way != 1) recipe->pieces[0] = {"c.weight"};
      if (name == "conv.weight" && way == 2) recipe->conversion = as_they_are;
      return recipe;
    };
    const auto load = [&](const std::string& folder) {
      return RunAllRanks(3, [&](Communicator& world) -> absl::Status {
        const auto net = std::make_shared<FusedImpl>();
        net->to(c10::kHalf);
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), BlockUnits()));
        return LoadModel(root + folder, *model, options);
      });
    };
    EXPECT_OK(load("/inf")) << way;
    // One rank has the value, and all name it.
    EXPECT_THAT(
        load("/m"),
        StatusIs(
            absl::StatusCode::kInvalidArgument,
            AllOf(HasSubstr("rank "),
                  HasSubstr(way == 2   ? "conv.weight, rows "
                            : way == 1 ? "/m/model.safetensors: c.weight: "
                                       : "/m/model.safetensors: conv.weight: "),
                  HasSubstr("it has the value 70000, which would become "
                            "infinite in Half: take Float for"))))
        << way;
  }
}

TEST(ModelFilesTest, AllThatDoesNotFitIsSaidAtOnceWithNothingChanged) {
  const std::string root = EmptyFolder("model_files_misfit");
  ASSERT_OK(ExportModel(root + "/m", *MakeNet(kDim, kBlocks, /*seed=*/1)));
  const auto load = [&](Communicator& world, bool strict) -> absl::Status {
    LoadModelOptions options;
    options.strict = strict;
    // The model has one block less than the files.
    FSDP_ASSIGN_OR_RETURN(auto model, ShardedNet(world, /*seed=*/2, 1));
    absl::Status loaded = LoadModel(root + "/m", *model, options);
    FSDP_ASSIGN_OR_RETURN(const Values actual, Gather(model));
    // If it is refused, the model is as it was; else it has what both have.
    Values expected = ValuesOf(*MakeNet(kDim, strict ? 1 : kBlocks,
                                        /*seed=*/strict ? 2 : 1));
    for (const auto& [name, value] : actual) {
      if (expected.count(name) == 0) return absl::InternalError(name);
      FSDP_RETURN_IF_ERROR(
          CheckEqual({{name, value}}, {{name, expected[name]}}));
    }
    return loaded;
  };
  EXPECT_THAT(RunAllRanks(2, [&](Communicator& w) { return load(w, true); }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(root + "/m: the files do not fit"),
                             HasSubstr("unexpected: blocks.1.fc.weight"),
                             HasSubstr("unexpected: blocks.1.out.bias"))));
  EXPECT_OK(RunAllRanks(2, [&](Communicator& w) { return load(w, false); }));
  const auto larger = MakeNet(kDim, 3, /*seed=*/2);
  EXPECT_THAT(LoadModel(root + "/m", *larger),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("missing: blocks.2.fc.weight"),
                             HasSubstr("missing: blocks.2.out.bias"))));
  EXPECT_OK(CheckEqual(ValuesOf(*larger), ValuesOf(*MakeNet(kDim, 3, 2))));
}

TEST(ModelFilesTest, WhatOneRankRefusesAllRefuse) {
  const std::string root = EmptyFolder("model_files_refuse");
  ASSERT_OK(ExportModel(root + "/m", *MakeNet(kDim, kBlocks, /*seed=*/1)));
  // Only rank 1 has no such file.
  EXPECT_THAT(
      RunAllRanks(2,
                  [&](Communicator& world) -> absl::Status {
                    FSDP_ASSIGN_OR_RETURN(auto model, ShardedNet(world, 2));
                    absl::Status loaded = LoadModel(
                        root + (world.rank() == 1 ? "/none" : "/m"), *model);
                    FSDP_ASSIGN_OR_RETURN(const Values actual, Gather(model));
                    FSDP_RETURN_IF_ERROR(CheckEqual(
                        actual, ValuesOf(*MakeNet(kDim, kBlocks, 2))));
                    return loaded;
                  }),
      StatusIs(absl::StatusCode::kNotFound,
               AllOf(HasSubstr("rank 1: "), HasSubstr("/none"))));
  // Only rank 0 looks whether the folder is there.
  EXPECT_THAT(ExportNet(3, root + "/m", /*seed=*/2),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("/m is there already")));
  EXPECT_THAT(ExportNet(3, root + "/no/such", /*seed=*/2),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such")));
  for (const std::string& name :
       {std::string("../up"), std::string("a\\b"), std::string(".hidden"),
        std::string(256, 'a'), std::string("x.safetensors")}) {
    ExportOptions options;
    options.texts[name] = "";
    EXPECT_THAT(ExportNet(2, root + "/n", /*seed=*/2, options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat("\"", name, "\" is no name"))));
  }
  EXPECT_THAT(NamesIn(root), ElementsAre("m"));
}

TEST(ModelFilesTest, TheWrappedModuleHasNoValues) {
  const std::string root = EmptyFolder("model_files_wrapped");
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const auto net = MakeNet(kDim, kBlocks, /*seed=*/1);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), BlockUnits()));
    EXPECT_THAT(ExportModel(root + "/m", *net),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("pass the model that FullyShard()")));
    return absl::OkStatus();
  }));
}

TEST(ModelFilesTest, TiedWeightsAndBuffers) {
  const std::string root = EmptyFolder("model_files_tied");
  ::fsdp::testing::ToyTransformerOptions toy;
  toy.batch_norm = true;
  const auto original = MakeTransformer(toy);
  ASSERT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeTransformer(toy),
                                                 Unowned(world), LayerUnits()));
    return ExportModel(root + "/m", *model);
  }));
  // The tied weight is written once, by its first name.
  const std::string file = ReadWholeFile(root + "/m/model.safetensors");
  EXPECT_NE(absl::StrContains(file, "\"head.weight\""),
            absl::StrContains(file, "\"embed.weight\""));
  EXPECT_THAT(file, HasSubstr("\"bn.running_mean\""));
  EXPECT_OK(
      LoadOn(3, root + "/m", ValuesOf(*original), [&toy](Communicator& world) {
        const auto other = MakeTransformer(toy);
        FillParameters(*other, /*seed=*/9);
        return FullyShard(other, Unowned(world), LayerUnits());
      }));
}

TEST(ModelFilesTest, FillsModelsThatWereMadeWithoutMemory) {
  const std::string root = EmptyFolder("model_files_deferred");
  ASSERT_OK(ExportModel(root + "/m", *MakeNet(kDim, kBlocks, /*seed=*/1)));
  const Values expected = ValuesOf(*MakeNet(kDim, kBlocks, /*seed=*/1));
  const auto make = [] {
    DeferredInitOptions options;
    options.min_bytes = 0;
    const DeferredInit deferred(options);
    return std::make_shared<NetImpl>(kDim, kBlocks);
  };
  const auto shard = [&make](Communicator& world) {
    return FullyShard(make(), Unowned(world), BlockUnits());
  };
  for (const int ranks : {1, 2, 3}) {
    EXPECT_OK(LoadOn(ranks, root + "/m", expected, shard)) << ranks;
  }
  const auto plain = make();
  ASSERT_OK(LoadModel(root + "/m", *plain));
  EXPECT_OK(CheckEqual(ValuesOf(*plain), expected));
}

TEST(ModelFilesTest, TellsHowFarItIs) {
  const std::string root = EmptyFolder("model_files_progress");
  ASSERT_OK(ExportModel(root + "/m", *MakeNet(kDim, kBlocks, /*seed=*/1)));
  LoadModelOptions options;
  int64_t last = 0, bytes = 0;
  options.progress = [&](int64_t done, int64_t all) {
    EXPECT_GT(done, last);
    last = done;
    bytes = all;
  };
  const auto plain = MakeNet(kDim, kBlocks, /*seed=*/2);
  ASSERT_OK(LoadModel(root + "/m", *plain, options));
  int64_t expected = 0;
  for (const at::Tensor& parameter : plain->parameters()) {
    expected += static_cast<int64_t>(parameter.nbytes());
  }
  EXPECT_EQ(last, expected);
  EXPECT_EQ(bytes, expected);
}

}  // namespace
}  // namespace fsdp::checkpoint
