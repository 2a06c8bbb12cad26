// Compares the model as units of FullyShard() with the same model on one rank.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/sgd.h>
#include <torch/ordered_dict.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/largest_difference.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/model/documents.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::LargestDifference;

constexpr int kRanks = 2, kSteps = 3;
constexpr double kRate = 0.5;
constexpr uint64_t kSeed = 5;

// `ranks` outlives it.
std::shared_ptr<Communicator> Unowned(Communicator& ranks) {
  return {std::shared_ptr<void>(), &ranks};
}

struct Case {
  std::string name;
  std::string type;
  std::string more;  // of the configuration
  bool recompute = false;
  bool bfloat16 = false;
  DocumentStarts starts = {};
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

absl::StatusOr<LlamaConfig> ConfigOf(const Case& one) {
  return ParseLlamaConfig(absl::StrCat(
      R"({"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24,
          "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 4, "model_type": ")",
      one.type, "\"", one.more, "}"));
}

// Returns two rows of six tokens for a rank; half of the targets count.
at::Tensor Tokens(int rank) {
  return (at::arange(12).view({2, 6}) * (rank + 3)).remainder(23);
}
at::Tensor Targets(int rank) {
  at::Tensor targets = Tokens(rank) + 1;
  targets.slice(1, 0, 6, 2).fill_(-100);
  return targets.clamp_max(22);
}

struct Trained {
  std::vector<double> losses;  // of rank 0
  torch::OrderedDict<std::string, at::Tensor> parameters;
};

absl::StatusOr<Trained> TrainPlain(const Case& one) {
  FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ConfigOf(one));
  CausalLm model(config);
  InitializeParameters(*model, kSeed, 0.2);
  torch::optim::SGD optimizer(model->parameters(), kRate);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor loss =
          model->forward(Tokens(rank), one.starts, Targets(rank));
      (loss / kRanks).backward();
      if (rank == 0) trained.losses.push_back(loss.item<double>());
    }
    optimizer.step();
  }
  trained.parameters = model->named_parameters();
  return trained;
}

fsdp::Options OptionsOf(const Case& one) {
  fsdp::Options options;
  options.wrap_policy = fsdp::WrapModules<DecoderLayerImpl>();
  if (one.recompute) options.recompute.units = fsdp::EveryUnit();
  if (one.bfloat16) {
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.reduce_dtype = at::kFloat;
  }
  return options;
}

absl::StatusOr<Trained> TrainSharded(const Case& one, Communicator& ranks) {
  FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ConfigOf(one));
  CausalLm whole(config);
  InitializeParameters(*whole, kSeed, 0.2);
  FSDP_ASSIGN_OR_RETURN(
      auto model, fsdp::FullyShard(whole, Unowned(ranks), OptionsOf(one)));
  torch::optim::SGD optimizer(model->Parameters(), kRate);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss =
        model->forward(Tokens(ranks.rank()), one.starts, Targets(ranks.rank()));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    trained.losses.push_back(loss.item<double>());
    optimizer.step();
  }
  FSDP_ASSIGN_OR_RETURN(trained.parameters, model->GatherStateDict());
  return trained;
}

absl::Status Compare(const Case& one, const Trained& plain,
                     const Trained& sharded, bool with_losses) {
  const double tolerance = one.bfloat16 ? 0.05 : 1e-5;
  for (int step = 0; with_losses && step < kSteps; ++step) {
    if (std::abs(sharded.losses[step] - plain.losses[step]) < tolerance) {
      continue;
    }
    return absl::InternalError(absl::StrCat("step ", step, ": loss ",
                                            sharded.losses[step], " not ",
                                            plain.losses[step]));
  }
  FSDP_RETURN_IF_ERROR(CheckThat(sharded.parameters.size(),
                                 plain.parameters.size(), "parameters"));
  for (const auto& item : plain.parameters) {
    if (sharded.parameters[item.key()].allclose(item.value(), tolerance,
                                                tolerance)) {
      continue;
    }
    return absl::InternalError(absl::StrCat(
        item.key(), " is off by up to ",
        LargestDifference(sharded.parameters[item.key()], item.value())));
  }
  return absl::OkStatus();
}

class ShardedLlamaTest : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Cases, ShardedLlamaTest,
    ::testing::Values(
        Case{"Untied", "qwen3", R"(, "attention_bias": true)"},
        Case{"Tied", "llama", R"(, "tie_word_embeddings": true)"},
        Case{"Documents", "qwen2", "", false, false, {0, 4, 6, 7}},
        Case{"Recomputed", "qwen3", "", true, false, {0, 4, 6, 7}},
        Case{"Bfloat16", "qwen2", "", false, true}),
    [](const auto& info) { return info.param.name; });

TEST_P(ShardedLlamaTest, TrainsAsOnOneRank) {
  const Case& one = GetParam();
  ASSERT_OK_AND_ASSIGN(const Trained plain, TrainPlain(one));
  EXPECT_LT(plain.losses.back(), plain.losses.front() - 0.1);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& ranks) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Trained sharded, TrainSharded(one, ranks));
    return Compare(one, plain, sharded, ranks.rank() == 0);
  }));
}

// The model is constructed without memory, and every rank computes the initial
// values of its own shards.
TEST(DeferredLlamaTest, HasTheSameLogitsOnAnyNumberOfRanks) {
  const auto logits = [](int count) {
    at::Tensor result;
    EXPECT_OK(RunAllRanks(count, [&](Communicator& ranks) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const LlamaConfig config,
                            ConfigOf({"", "qwen3", ""}));
      CausalLm net{nullptr};
      {
        const fsdp::DeferredInit deferred({/*min_bytes=*/0});
        net = CausalLm(config);
        InitializeParameters(*net, kSeed, 0.2);
      }
      FSDP_ASSIGN_OR_RETURN(
          auto model, fsdp::FullyShard(net, Unowned(ranks), OptionsOf({})));
      const c10::NoGradGuard no_grad;
      const at::Tensor value = model->forward(Tokens(0));
      if (ranks.rank() == 0) result = value;
      return absl::OkStatus();
    }));
    return result;
  };
  const at::Tensor one = logits(1), two = logits(2);
  EXPECT_GT(one.abs().max().item<double>(), 0.1);
  EXPECT_TRUE(one.equal(two));
}

}  // namespace
}  // namespace llama
