// Models and optimizers from folders that torchtitan and Megatron wrote.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp/testing/samples.h"
#include "checkpoint/dcp_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::PutDcpSample;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::optim::AdamW;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

using Shapes = std::map<std::string, std::vector<int64_t>>;
using Values = std::map<std::string, at::Tensor>;

// Parameters of zeros in modules as their names say.
struct NamedImpl : torch::nn::Module {
  explicit NamedImpl(const Shapes& shapes) {
    for (const auto& [name, shape] : shapes) {
      std::vector<std::string> path = absl::StrSplit(name, '.');
      const std::string last = path.back();
      path.pop_back();
      torch::nn::Module* module = this;
      for (const std::string& key : path) {
        const auto children = module->named_children();
        const auto* const child = children.find(key);
        module =
            child == nullptr
                ? module->register_module(key, std::make_shared<Inner>()).get()
                : child->get();
      }
      module->register_parameter(last, at::zeros(shape));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x; }

  struct Inner : torch::nn::Module {};
};

// `sizes` in row-major order, from `first` on.
at::Tensor Count(double first, const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return (at::arange(numel, at::kDouble) + first).to(at::kFloat).view(sizes);
}

Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach();
  }
  return values;
}

absl::Status ExpectEqual(const Values& expected, const Values& actual) {
  if (expected.size() != actual.size()) return absl::InternalError("names");
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end() || !at::equal(value, found->second)) {
      return absl::InternalError(absl::StrCat(name, " differs"));
    }
  }
  return absl::OkStatus();
}

// The n-th tensor by name begins with 1000 n.
Values Counted(const Shapes& shapes) {
  Values values;
  for (const auto& [name, shape] : shapes) {
    values[name] = Count(1000.0 * static_cast<double>(values.size()), shape);
  }
  return values;
}

const Shapes& Llama() {
  static const auto* const shapes = new Shapes{
      {"layers.0.attention.wk.weight", {8, 8}},
      {"layers.0.attention.wo.weight", {8, 8}},
      {"layers.0.attention.wq.weight", {8, 8}},
      {"layers.0.attention.wv.weight", {8, 8}},
      {"layers.0.attention_norm.weight", {8}},
      {"layers.0.feed_forward.w1.weight", {24, 8}},
      {"layers.0.feed_forward.w2.weight", {8, 24}},
      {"layers.0.feed_forward.w3.weight", {24, 8}},
      {"layers.0.ffn_norm.weight", {8}},
      {"norm.weight", {8}},
      {"output.weight", {5, 8}},
      {"tok_embeddings.weight", {5, 8}},
  };
  return *shapes;
}

const Shapes& TwoLayers() {
  static const auto* const shapes =
      new Shapes{{"norm.weight", {4}}, {"output.weight", {5, 4}}};
  return *shapes;
}

// --- Megatron's names ------------------------------------------------------

constexpr int64_t kGroups = 2;
constexpr int64_t kQueries = 2;  // of each group
constexpr int64_t kHead = 2;
constexpr int64_t kFfn = 6;
constexpr int64_t kDim = 8;
constexpr int64_t kLayers = 2;

using Rows = std::optional<std::pair<int64_t, int64_t>>;

// A part of the fused projection: of each group its queries, its key, its
// value, one behind the other.
TensorRecipe PartOfQkv(int64_t layer, int64_t first_head, int64_t heads) {
  TensorRecipe recipe;
  for (int64_t group = 0; group < kGroups; ++group) {
    const int64_t first = (group * (kQueries + 2) + first_head) * kHead;
    recipe.pieces.push_back({"decoder.layers.self_attention.linear_qkv.weight",
                             Rows({first, first + heads * kHead}),
                             /*transposed=*/false, layer});
  }
  return recipe;
}

std::optional<TensorRecipe> FromMegatron(const std::string& name) {
  if (name == "tok_embeddings.weight") {
    return TensorRecipe::Of("embedding.word_embeddings.weight");
  }
  if (name == "norm.weight") {
    return TensorRecipe::Of("decoder.final_layernorm.weight");
  }
  const std::vector<std::string> path =  // "layers", "0", "attention", ...
      absl::StrSplit(name, absl::MaxSplits('.', 2));
  const int64_t layer = std::stoll(path[1]);
  if (path[2] == "attention.wq.weight") return PartOfQkv(layer, 0, kQueries);
  if (path[2] == "attention.wk.weight") return PartOfQkv(layer, kQueries, 1);
  if (path[2] == "attention.wv.weight") {
    return PartOfQkv(layer, kQueries + 1, 1);
  }
  static const std::map<std::string, std::pair<std::string, Rows>> rest = {
      {"attention.wo.weight", {"self_attention.linear_proj.weight", {}}},
      {"attention_norm.weight",
       {"self_attention.linear_qkv.layer_norm_weight", {}}},
      {"feed_forward.w1.weight", {"mlp.linear_fc1.weight", {{0, kFfn}}}},
      {"feed_forward.w3.weight", {"mlp.linear_fc1.weight", {{kFfn, 2 * kFfn}}}},
      {"feed_forward.w2.weight", {"mlp.linear_fc2.weight", {}}},
      {"ffn_norm.weight", {"mlp.linear_fc1.layer_norm_weight", {}}},
  };
  const auto& [key, rows] = rest.at(path[2]);
  TensorRecipe recipe;
  recipe.pieces = {{absl::StrCat("decoder.layers.", key), rows,
                    /*transposed=*/false, layer}};
  return recipe;
}

// By the sample's script: what is the n-th tensor by name begins with 1000 n.
Values ValuesOfGpt() {
  Values values = {{"norm.weight", Count(0, {kDim})},
                   {"tok_embeddings.weight", Count(7000, {16, kDim})}};
  const at::Tensor fc1 = Count(2000, {kLayers, 2, kFfn, kDim});
  const at::Tensor qkv =
      Count(6000, {kLayers, kGroups, kQueries + 2, kHead, kDim});
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const auto add = [&](const char* name, const at::Tensor& value) {
      values[absl::StrCat("layers.", layer, ".", name, ".weight")] =
          value.contiguous();
    };
    const at::Tensor own = qkv[layer];
    add("attention.wq", own.slice(1, 0, kQueries).reshape({-1, kDim}));
    add("attention.wk", own.select(1, kQueries).reshape({-1, kDim}));
    add("attention.wv", own.select(1, kQueries + 1).reshape({-1, kDim}));
    add("attention.wo", Count(4000, {kLayers, kDim, kDim})[layer]);
    add("attention_norm", Count(5000, {kLayers, kDim})[layer]);
    add("feed_forward.w1", fc1[layer][0]);
    add("feed_forward.w3", fc1[layer][1]);
    add("feed_forward.w2", Count(3000, {kLayers, kDim, kFfn})[layer]);
    add("ffn_norm", Count(1000, {kLayers, kDim})[layer]);
  }
  return values;
}

// --- Tests -----------------------------------------------------------------

class ForeignDcpTest : public ::testing::Test {
 protected:
  LoadModelOptions ForModel(TensorMapping mapping = nullptr) {
    LoadModelOptions options;
    options.files = &disk_;
    options.mapping = std::move(mapping);
    return options;
  }
  LoadDcpOptions ForRun() {
    LoadDcpOptions options;
    options.files = &disk_;
    return options;
  }

  // By several numbers of ranks, and by a program without.
  void ExpectModel(const std::string& folder, const Values& expected,
                   const LoadModelOptions& options) {
    Shapes shapes;
    for (const auto& [name, value] : expected) {
      shapes[name] = value.sizes().vec();
    }
    for (const int ranks : {1, 2, 3}) {
      EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(std::make_shared<NamedImpl>(shapes),
                                         Unowned(world), BlockUnits()));
        FSDP_RETURN_IF_ERROR(LoadModel(folder, *model, options));
        FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
        Values actual;
        for (const auto& item : dict) actual[item.key()] = item.value();
        return ExpectEqual(expected, actual);
      })) << ranks;
    }
    NamedImpl plain(shapes);
    EXPECT_OK(LoadModel(folder, plain, options));
    EXPECT_OK(ExpectEqual(expected, ValuesOf(plain)));
  }

  // The same of a run whose optimizer has the parameters in `trained`, by way
  // of `ranks` ranks that hand over to one process; 0: without them.
  absl::Status LoadRun(const std::string& from, const Shapes& shapes,
                       const Shapes& trained, int ranks) {
    const auto freeze = [&](torch::nn::Module& module) {
      for (const auto& item : module.named_parameters()) {
        item.value().set_requires_grad(trained.count(item.key()) > 0);
      }
    };
    std::string folder = from;
    if (ranks > 0) {
      folder = absl::StrCat(from, "-by-", ranks);
      FSDP_RETURN_IF_ERROR(
          RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
            auto net = std::make_shared<NamedImpl>(shapes);
            freeze(*net);
            FSDP_ASSIGN_OR_RETURN(
                auto model, FullyShard(net, Unowned(world), BlockUnits()));
            std::vector<at::Tensor> parameters;
            for (const at::Tensor& parameter : model->Parameters()) {
              if (parameter.requires_grad()) parameters.push_back(parameter);
            }
            AdamW optimizer(parameters);
            TrainingRun run;
            run.model = model.get();
            run.optimizer = &optimizer;
            FSDP_RETURN_IF_ERROR(LoadDcp(from, run, ForRun()));
            ExportDcpOptions options;
            options.files = &disk_;
            return ExportDcp(folder, run, options);
          }));
    }
    NamedImpl net(shapes);
    freeze(net);
    std::vector<at::Tensor> parameters;
    for (const auto& item : net.named_parameters()) {
      if (item.value().requires_grad()) parameters.push_back(item.value());
    }
    AdamW optimizer(parameters);
    TrainingRun run;
    run.model = &net;
    run.optimizer = &optimizer;
    FSDP_RETURN_IF_ERROR(LoadDcp(folder, run, ForRun()));
    FSDP_RETURN_IF_ERROR(ExpectEqual(Counted(shapes), ValuesOf(net)));
    return ExpectStates(net, optimizer);
  }

  // As the script has set them.
  static absl::Status ExpectStates(const torch::nn::Module& net,
                                   AdamW& optimizer) {
    const auto& options = dynamic_cast<torch::optim::AdamWOptions&>(
        optimizer.param_groups()[0].options());
    EXPECT_EQ(options.lr(), 0.125);
    EXPECT_EQ(options.betas(), std::make_tuple(0.875, 0.75));
    EXPECT_EQ(options.eps(), 1.0 / (1 << 20));
    EXPECT_EQ(options.weight_decay(), 0.0625);
    for (const auto& item : net.named_parameters()) {
      if (!item.value().requires_grad()) continue;
      const auto found =
          optimizer.state().find(item.value().unsafeGetTensorImpl());
      if (found == optimizer.state().end()) {
        return absl::InternalError(absl::StrCat("no state of ", item.key()));
      }
      auto& state =
          dynamic_cast<torch::optim::AdamWParamState&>(*found->second);
      const at::Tensor value = item.value().detach();
      EXPECT_EQ(state.step(), 7);
      EXPECT_TRUE(at::equal(state.exp_avg(), value + 0.25)) << item.key();
      EXPECT_TRUE(at::equal(state.exp_avg_sq(), value + 0.5)) << item.key();
    }
    return absl::OkStatus();
  }

  SimulatedFileSystem disk_;
};

TEST_F(ForeignDcpTest, AModelOfTorchtitan) {
  ExpectModel(PutDcpSample(disk_, "torchtitan_0_2"), Counted(Llama()),
              ForModel());
  ExpectModel(PutDcpSample(disk_, "torchtitan_0_3"), Counted(TwoLayers()),
              ForModel());
}

// One that trains a parameter of the model's, and one that trains all.
TEST_F(ForeignDcpTest, ARunOfTorchtitan) {
  const std::string llama = PutDcpSample(disk_, "torchtitan_0_2");
  const std::string small = PutDcpSample(disk_, "torchtitan_0_3");
  for (const int ranks : {0, 1, 2, 3}) {
    EXPECT_OK(LoadRun(llama, Llama(), {{"output.weight", {}}}, ranks)) << ranks;
    EXPECT_OK(LoadRun(small, TwoLayers(), TwoLayers(), ranks)) << ranks;
  }
}

TEST_F(ForeignDcpTest, AModelOfMegatron) {
  const std::string folder = PutDcpSample(disk_, "megatron_0_16");
  ExpectModel(folder, ValuesOfGpt(), ForModel(FromMegatron));
  const Shapes older = {{"decoder.layers.mlp.linear_fc2.weight", {2, 4, 6}},
                        {"output_layer.weight", {6, 4}}};
  const Values expected = {
      {"decoder.layers.mlp.linear_fc2.weight", Count(0, {2, 4, 6})},
      {"output_layer.weight", Count(3000, {6, 4})}};
  ExpectModel(PutDcpSample(disk_, "megatron_0_15"), expected, ForModel());
}

// Which needs the whole tensor of a layer once.
TEST_F(ForeignDcpTest, TheTransposeOfALayer) {
  const std::string folder = PutDcpSample(disk_, "megatron_0_16");
  LoadModelOptions options = ForModel([](const std::string&) {
    TensorRecipe recipe;
    recipe.pieces = {{"decoder.layers.mlp.linear_fc2.weight", Rows({1, 5}),
                      /*transposed=*/true, /*layer=*/1}};
    return recipe;
  });
  options.strict = false;
  const Values expected = {
      {"w", Count(3000, {kLayers, kDim, kFfn})[1].slice(0, 1, 5).t()}};
  ExpectModel(folder, expected, options);
}

TEST_F(ForeignDcpTest, WhatIsNotReadOfMegatronIsRefusedByName) {
  const std::string folder = PutDcpSample(disk_, "megatron_0_15");
  NamedImpl net({{"decoder.layers.mlp.linear_fc2.weight", {2, 4, 6}},
                 {"output_layer.weight", {6, 4}}});
  AdamW optimizer(net.parameters());
  TrainingRun run;
  run.model = &net;
  run.optimizer = &optimizer;
  EXPECT_THAT(
      LoadDcp(folder, run, ForRun()),
      StatusIs(kInvalid, HasSubstr("has the optimizer as Megatron keeps "
                                   "it, such as \"optimizer.state.")));
  EXPECT_TRUE(at::equal(net.parameters()[0], at::zeros({2, 4, 6})));
  run.optimizer = nullptr;
  EXPECT_OK(LoadDcp(folder, run, ForRun()));
  // Names of another model: both sides are listed, the optimizer is not.
  NamedImpl other(Llama());
  EXPECT_THAT(
      LoadModel(folder, other, ForModel()),
      StatusIs(kInvalid, AllOf(HasSubstr("missing: norm.weight"),
                               HasSubstr("unexpected: output_layer.weight"),
                               Not(HasSubstr("exp_avg")))));
}

}  // namespace
}  // namespace fsdp::checkpoint
