// What torchtitan and Megatron wrote: every element of every tensor.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/dcp_optimizer.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/testing/samples.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Shape = std::vector<int64_t>;

const char* const kTitanLlama[] = {
    "layers.0.attention.wk.weight",
    "layers.0.attention.wo.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wv.weight",
    "layers.0.attention_norm.weight",
    "layers.0.feed_forward.w1.weight",
    "layers.0.feed_forward.w2.weight",
    "layers.0.feed_forward.w3.weight",
    "layers.0.ffn_norm.weight",
    "norm.weight",
    "output.weight",
    "tok_embeddings.weight",
};
// By name, as they are counted.
const std::map<std::string, Shape> kMegatronGpt = {
    {"decoder.final_layernorm.weight", {8}},
    {"decoder.layers.mlp.linear_fc1.layer_norm_weight", {2, 8}},
    {"decoder.layers.mlp.linear_fc1.weight", {2, 12, 8}},
    {"decoder.layers.mlp.linear_fc2.weight", {2, 8, 6}},
    {"decoder.layers.self_attention.linear_proj.weight", {2, 8, 8}},
    {"decoder.layers.self_attention.linear_qkv.layer_norm_weight", {2, 8}},
    {"decoder.layers.self_attention.linear_qkv.weight", {2, 16, 8}},
    {"embedding.word_embeddings.weight", {16, 8}},
    {"optimizer.state.exp_avg.decoder.final_layernorm.weight", {8}},
    {"optimizer.state.exp_avg_sq.decoder.final_layernorm.weight", {8}},
};

class DcpSamplesTest : public ::testing::Test {
 protected:
  // A folder, whole, or the model in it.
  Catalog Read(absl::string_view sample, bool model_only) {
    if (folder_.empty()) folder_ = testing::PutDcpSample(files_, sample);
    DcpCatalogOptions options;
    options.model_only = model_only;
    const auto catalog = ReadDcpCatalog(files_, folder_, options);
    EXPECT_OK(catalog.status());
    return catalog.ok() ? *catalog : Catalog();
  }

  std::vector<float> Values(const Catalog& catalog,
                            const StoredTensor& tensor) {
    const int64_t numel = *NumelOf(tensor.info);
    std::vector<float> values(static_cast<size_t>(numel), -1);
    const auto runs = RunsOf(tensor, 0, numel);
    EXPECT_OK(runs.status());
    for (const FileRun& run : *runs) {
      const auto file = files_.OpenForReading(
          JoinPath(folder_, catalog.files()[run.file].name), Caching::kCached);
      EXPECT_OK(file.status());
      EXPECT_OK((*file)->PRead(
          run.offset,
          absl::MakeSpan(reinterpret_cast<char*>(values.data()) + run.target,
                         static_cast<size_t>(run.bytes))));
    }
    return values;
  }

  // Element i of the tensor `name` is `first` + i.
  void ExpectCounts(const Catalog& catalog, const std::string& name,
                    double first) {
    const StoredTensor* const tensor = catalog.Find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(tensor->info.dtype, Dtype::kF32) << name;
    const std::vector<float> values = Values(catalog, *tensor);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], first + static_cast<double>(i)) << name << " " << i;
    }
  }

  testing::SimulatedFileSystem files_;
  std::string folder_;
};

TEST_F(DcpSamplesTest, TheModelOfTorchtitan02) {
  const Catalog model = Read("torchtitan_0_2", /*model_only=*/true);
  ASSERT_EQ(model.tensors().size(), std::size(kTitanLlama));
  for (size_t i = 0; i < std::size(kTitanLlama); ++i) {
    ExpectCounts(model, kTitanLlama[i], 1000.0 * static_cast<double>(i));
  }
  EXPECT_THAT(model.Find("output.weight")->info.shape, ElementsAre(5, 8));
}

TEST_F(DcpSamplesTest, TheOptimizerOfTorchtitan02) {
  Read("torchtitan_0_2", /*model_only=*/true);
  ASSERT_OK_AND_ASSIGN(DcpMetadata metadata, ReadDcpFolder(files_, folder_));
  TakeModel(metadata);
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer optimizer,
                       ReadDcpOptimizer(files_, folder_, metadata));
  ASSERT_EQ(optimizer.slots.size(), 2u);
  ExpectCounts(optimizer.slots.at("exp_avg"), "output.weight", 10000.25);
  ExpectCounts(optimizer.slots.at("exp_avg_sq"), "output.weight", 10000.5);
  EXPECT_THAT(optimizer.numbers,
              ElementsAre(Pair("output.weight", ElementsAre(Pair("step", 7)))));
  EXPECT_TRUE(optimizer.is_flattened);
  ASSERT_EQ(optimizer.groups.size(), 1u);
  EXPECT_EQ(optimizer.groups[0].options.at("lr"), Json(0.125));
  EXPECT_EQ(optimizer.groups[0].options.at("betas"),
            Json(Json::Array{0.875, 0.75}));
}

TEST_F(DcpSamplesTest, AllOfTorchtitan03) {
  const Catalog all = Read("torchtitan_0_3", /*model_only=*/false);
  const Catalog model = Read("torchtitan_0_3", /*model_only=*/true);
  ASSERT_EQ(model.tensors().size(), 2u);
  ExpectCounts(model, "norm.weight", 0);
  ExpectCounts(model, "output.weight", 1000);
  ExpectCounts(all, "optimizer.state.norm.weight.exp_avg", 0.25);
  ExpectCounts(all, "optimizer.state.norm.weight.exp_avg_sq", 0.5);
  ExpectCounts(all, "optimizer.state.output.weight.exp_avg", 1000.25);
  ExpectCounts(all, "optimizer.state.output.weight.exp_avg_sq", 1000.5);
  ASSERT_OK_AND_ASSIGN(DcpMetadata metadata, ReadDcpFolder(files_, folder_));
  TakeModel(metadata);
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer optimizer,
                       ReadDcpOptimizer(files_, folder_, metadata));
  EXPECT_EQ(optimizer.groups.size(), 2u);
}

// Tensors of two layers in one; extra states and the like are passed over.
TEST_F(DcpSamplesTest, AllOfMegatron016) {
  const Catalog all = Read("megatron_0_16", /*model_only=*/false);
  ASSERT_EQ(all.tensors().size(), kMegatronGpt.size());
  double first = 0;
  for (const auto& [name, shape] : kMegatronGpt) {
    ExpectCounts(all, name, first);
    EXPECT_EQ(all.Find(name)->info.shape, shape) << name;
    first += 1000;
  }
  const Catalog model = Read("megatron_0_16", /*model_only=*/true);
  EXPECT_EQ(model.tensors().size(), kMegatronGpt.size() - 2);
  for (const StoredTensor& tensor : model.tensors()) {
    EXPECT_FALSE(absl::StrContains(tensor.info.name, "optimizer"));
  }
}

// What its distributed optimizer has flattened is read as it is there: pieces
// of one part after the other.
TEST_F(DcpSamplesTest, AllOfMegatron015) {
  const Catalog all = Read("megatron_0_15", /*model_only=*/false);
  ASSERT_EQ(all.tensors().size(), 4u);
  ExpectCounts(all, "decoder.layers.mlp.linear_fc2.weight", 0);
  ExpectCounts(all, "optimizer.state.exp_avg.norm.weight", 1000);
  ExpectCounts(all, "optimizer.state.exp_avg.output_layer.weight", 2000);
  ExpectCounts(all, "output_layer.weight", 3000);
  EXPECT_THAT(
      all.Find("optimizer.state.exp_avg.output_layer.weight")->info.shape,
      ElementsAre(2, 1, 12));
  const Catalog model = Read("megatron_0_15", /*model_only=*/true);
  EXPECT_EQ(model.tensors().size(), 2u);
}

TEST_F(DcpSamplesTest, MegatronsOptimizerIsRefusedByName) {
  Read("megatron_0_15", /*model_only=*/true);
  ASSERT_OK_AND_ASSIGN(DcpMetadata metadata, ReadDcpFolder(files_, folder_));
  TakeModel(metadata);
  EXPECT_THAT(
      ReadDcpOptimizer(files_, folder_, metadata).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("/megatron_0_15: has the optimizer as Megatron "
                               "keeps it, such as \"optimizer.state.exp_avg."),
                     HasSubstr("load the model alone"))));
}

TEST(IsMegatronOptimizerTest, ByNamesWhereThereIsNothingElse) {
  DcpMetadata metadata;
  for (const char* const name :
       {"optimizer.state.exp_avg.w", "chained_0.optimizer.distributed.w",
        "chained_12.optimizer.state.w"}) {
    EXPECT_TRUE(IsMegatronOptimizer(metadata, name)) << name;
  }
  for (const char* const name :
       {"w", "optimizers.w", "optimizer", "chained_0.w", "chained_",
        "chained_0", "chained_x.optimizer.w", "chained_0optimizer.w",
        "model.optimizer.w"}) {
    EXPECT_FALSE(IsMegatronOptimizer(metadata, name)) << name;
  }
  // Otherwise paths tell.
  metadata.paths.emplace_back("optimizer.w", DcpPath{"optimizer.w"});
  EXPECT_FALSE(IsMegatronOptimizer(metadata, "optimizer.w"));
}

}  // namespace
}  // namespace fsdp::checkpoint
