#include "flat_param/flat_parameter.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"

namespace fsdp::flat_param::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr char kFreed[] = "unit blocks.0 is not gathered";

std::vector<NamedParameter> Named(std::vector<at::Tensor> tensors) {
  std::vector<NamedParameter> parameters;
  parameters.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    parameters.push_back({absl::StrCat("p", i), {std::move(tensors[i])}});
  }
  return parameters;
}

at::Tensor Range(c10::IntArrayRef sizes, float first = 1) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return (at::arange(numel, at::kFloat) + first).view(sizes).contiguous();
}

// Returns a tensor of every layout in which a parameter may lie.
std::vector<at::Tensor> EveryKind() {
  return {
      Range({5, 3}),
      Range({4, 6}, 100).t(),
      Range({2, 3, 2, 2}, 200).contiguous(at::MemoryFormat::ChannelsLast),
      Range({7}, 300),
      at::tensor(400.f),
      at::empty({0, 4}),
      Range({3, 1, 5}, 500).permute({2, 0, 1}),
  };
}

// One rank's flat parameter and its gathered memory.
struct Rank {
  FlatParameter parameter;
  at::Tensor memory;
};

FlatLayout LayoutFor(const std::vector<NamedParameter>& parameters,
                     int world_size) {
  absl::StatusOr<FlatLayout> layout = LayoutOf(
      parameters, parameters.front().tensors.front().scalar_type(), world_size);
  EXPECT_OK(layout.status());
  return *std::move(layout);
}

at::Tensor AsMemory(const at::Tensor& flat) {
  return flat.clone().view(at::kByte);
}

Rank MakeRank(std::vector<NamedParameter> parameters, int world_size = 1,
              int rank = 0) {
  FlatLayout layout = LayoutFor(parameters, world_size);
  const at::Tensor flat = FlatParameter::Flatten(parameters, layout);
  return {FlatParameter(std::move(parameters), std::move(layout), flat, rank,
                        flat.scalar_type(), kFreed),
          AsMemory(flat)};
}

class WorldSizeTest : public ::testing::TestWithParam<int> {};

TEST_P(WorldSizeTest, ShardsAndTheirSlicesArePartsInStorageOrder) {
  const int world_size = GetParam();
  at::Tensor flat;
  std::vector<at::Tensor> shards;
  const std::vector<at::Tensor> values = EveryKind();
  std::vector<std::vector<at::Tensor>> parts(values.size());
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<NamedParameter> parameters = Named(EveryKind());
    const FlatLayout layout = LayoutFor(parameters, world_size);
    flat = FlatParameter::Flatten(parameters, layout);
    const FlatParameter parameter(parameters, layout, flat, rank,
                                  flat.scalar_type(), kFreed);
    EXPECT_EQ(parameter.rank(), rank);
    EXPECT_EQ(parameter.shard().numel(), layout.shard_numel());
    shards.push_back(parameter.shard());
    for (int i = 0; i < parameter.num_parameters(); ++i) {
      parts[i].push_back(parameter.ShardSlice(i).detach());
    }
  }
  EXPECT_TRUE(at::cat(shards).equal(flat));
  for (size_t i = 0; i < values.size(); ++i) {
    SCOPED_TRACE(i);
    const at::Tensor whole = at::cat(parts[i]);
    EXPECT_TRUE(whole.equal(
        values[i].as_strided({values[i].numel()}, {1}).contiguous()));
  }
}

TEST_P(WorldSizeTest, FilledParametersHaveTheirOldValuesSizesAndStrides) {
  const std::vector<at::Tensor> values = EveryKind();
  Rank rank = MakeRank(Named(EveryKind()), GetParam(), GetParam() - 1);
  EXPECT_OK(rank.parameter.CheckBinding());
  rank.parameter.Fill(rank.memory);
  EXPECT_OK(rank.parameter.CheckBinding());
  for (size_t i = 0; i < values.size(); ++i) {
    SCOPED_TRACE(i);
    const at::Tensor& tensor =
        rank.parameter.parameter(static_cast<int>(i)).tensors.front();
    EXPECT_EQ(tensor.strides(), values[i].strides());
    EXPECT_TRUE(tensor.equal(values[i]));
  }
  rank.parameter.Empty();
  EXPECT_OK(rank.parameter.CheckBinding());
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, WorldSizeTest,
                         ::testing::Values(1, 2, 3, 5, 8));

TEST(FlattenTest, PadsWithZeros) {
  const std::vector<NamedParameter> parameters =
      Named({Range({3}), Range({5})});
  const FlatLayout layout = LayoutFor(parameters, 3);
  const at::Tensor flat = FlatParameter::Flatten(parameters, layout);
  ASSERT_GT(flat.numel(), 8);
  EXPECT_EQ(flat.sum().item<float>(), 1 + 2 + 3 + 1 + 2 + 3 + 4 + 5);
  EXPECT_FALSE(flat.requires_grad());
}

TEST(FlattenTest, MakesTensorsWithGapsOrOverlapsContiguous) {
  const at::Tensor wide = Range({4, 6});
  const at::Tensor gaps = wide.narrow(1, 1, 3);
  const at::Tensor expanded = at::full({1}, 9.f).expand({4});
  const at::Tensor expected = gaps.clone();
  Rank rank = MakeRank(Named({gaps, expanded}));
  rank.parameter.Fill(rank.memory);
  EXPECT_TRUE(gaps.is_contiguous());
  EXPECT_TRUE(gaps.equal(expected));
  EXPECT_TRUE(expanded.is_contiguous());
  EXPECT_TRUE(expanded.equal(at::full({4}, 9.f)));
  EXPECT_TRUE(wide.equal(Range({4, 6}))) << "the tensor it was a view of";
}

TEST(FlatParameterTest, ShardDoesNotHoldTheFlatTensor) {
  const std::vector<NamedParameter> parameters = Named({Range({8, 8})});
  const FlatLayout layout = LayoutFor(parameters, 2);
  const at::Tensor flat = FlatParameter::Flatten(parameters, layout);
  const FlatParameter parameter(parameters, layout, flat, 1, flat.scalar_type(),
                                kFreed);
  EXPECT_FALSE(parameter.shard().is_alias_of(flat));
  EXPECT_EQ(parameter.shard().storage().nbytes(), flat.nbytes() / 2);
}

TEST(FlatParameterTest, SlicesAreLeavesThatAliasTheShard) {
  std::vector<at::Tensor> tensors = {Range({4, 4}), Range({4})};
  tensors[0].requires_grad_();
  const Rank rank = MakeRank(Named(tensors));
  for (int i = 0; i < 2; ++i) {
    const at::Tensor& slice = rank.parameter.ShardSlice(i);
    EXPECT_TRUE(slice.is_leaf());
    EXPECT_FALSE(slice.is_view());
    EXPECT_TRUE(slice.is_alias_of(rank.parameter.shard()));
    EXPECT_EQ(slice.dim(), 1);
    EXPECT_EQ(slice.requires_grad(), i == 0);
    EXPECT_TRUE(slice.is_same(rank.parameter.ShardSlice(i)));
  }
  c10::NoGradGuard no_grad;
  rank.parameter.ShardSlice(1).fill_(-1);
  EXPECT_EQ(rank.parameter.shard().narrow(0, 16, 4).sum().item<float>(), -4);
}

TEST(FlatParameterTest, ParametersKeepTheirIdentity) {
  at::Tensor weight = Range({4, 4}).requires_grad_();
  const c10::TensorImpl* impl = weight.unsafeGetTensorImpl();
  const Rank rank = MakeRank(Named({weight}));
  EXPECT_EQ(weight.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(weight.is_leaf());
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(rank.parameter.Owns(weight));
  EXPECT_TRUE(rank.parameter.Owns(weight.detach()));
  EXPECT_FALSE(rank.parameter.Owns(rank.parameter.shard()));
  EXPECT_FALSE(rank.parameter.Owns(at::Tensor()));
}

TEST(FlatParameterTest, HoldsItsMemoryWhileFilledOnly) {
  at::Tensor weight = Range({4, 4});
  Rank rank = MakeRank(Named({weight}));
  const size_t before = rank.memory.use_count();
  rank.parameter.Fill(rank.memory);
  EXPECT_EQ(rank.memory.use_count(), before + 1);
  rank.parameter.Empty();
  EXPECT_EQ(rank.memory.use_count(), before);
}

TEST(FlatParameterDeathTest, MemoryThatIsTooSmallStopsTheProgram) {
  Rank rank = MakeRank(Named({Range({4, 4})}));
  EXPECT_DEATH(rank.parameter.Fill(at::empty({63}, at::kByte)),
               "unsharded_bytes");
}

// Two layers whose weights lie elsewhere in backward than in forward.
TEST(FlatParameterTest, SavedTensorsSurviveAFillAtAnotherAddress) {
  const at::Tensor first = Range({3, 4}, -5).requires_grad_();
  const at::Tensor second = Range({2, 3}, -2).t().detach().requires_grad_();
  const at::Tensor x = Range({5, 4}).requires_grad_();
  const auto loss_of = [](const at::Tensor& x, const at::Tensor& first,
                          const at::Tensor& second) {
    return x.matmul(first.t()).tanh().matmul(second).square().sum();
  };
  loss_of(x, first, second).backward();
  const at::Tensor expected_x = x.grad().clone();
  const at::Tensor expected_first = first.grad().clone();
  const at::Tensor expected_second = second.grad().clone();
  for (const at::Tensor& tensor : {x, first, second}) {
    tensor.mutable_grad().reset();
  }

  Rank rank = MakeRank(Named({first, second}));
  rank.parameter.Fill(rank.memory);
  const int64_t version = first._version();
  const at::Tensor loss = loss_of(x, first, second);
  rank.parameter.Empty();
  const at::Tensor elsewhere = rank.memory.clone();
  rank.memory.fill_(255);
  rank.parameter.Fill(elsewhere);
  loss.backward();
  EXPECT_EQ(first._version(), version);
  EXPECT_TRUE(x.grad().equal(expected_x));
  EXPECT_TRUE(first.grad().equal(expected_first));
  EXPECT_TRUE(second.grad().equal(expected_second));
}

TEST(FlatParameterTest, TiedTensorsAreFilledAndEmptiedTogether) {
  at::Tensor weight = Range({4, 4}).requires_grad_();
  at::Tensor alias = weight.detach().requires_grad_();
  Rank rank = MakeRank({{"embedding", {weight, alias}}});
  for (const at::Tensor& memory : {rank.memory, rank.memory.clone()}) {
    EXPECT_FALSE(rank.parameter.filled());
    EXPECT_THAT(TorchToStatus("access", [&] { weight.sum(); }).message(),
                HasSubstr(kFreed));
    EXPECT_THAT(TorchToStatus("access", [&] { alias.sum(); }).message(),
                HasSubstr(kFreed));
    rank.parameter.Fill(memory);
    EXPECT_TRUE(rank.parameter.filled());
    EXPECT_TRUE(weight.equal(Range({4, 4})));
    EXPECT_TRUE(alias.equal(Range({4, 4})));
    EXPECT_EQ(alias.const_data_ptr(), weight.const_data_ptr());
    EXPECT_OK(rank.parameter.CheckBinding());
    rank.parameter.Empty();
  }
  EXPECT_EQ(rank.parameter.num_parameters(), 1);
  EXPECT_FALSE(rank.parameter.filled());
}

// Module::to(dtype) does this to each parameter.
TEST(CheckBindingTest, NamesAParameterOneOfWhoseTensorsWasConverted) {
  at::Tensor weight = Range({2});
  at::Tensor alias = weight.detach();
  Rank rank = MakeRank({{"bias", {Range({3})}}, {"weight", {weight, alias}}});
  rank.parameter.Fill(rank.memory);
  alias.set_data(alias.to(at::kDouble));
  EXPECT_THAT(rank.parameter.CheckBinding(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::AllOf(HasSubstr("parameter weight "),
                                        HasSubstr("moved, converted"))));
}

}  // namespace
}  // namespace fsdp::flat_param::testing
