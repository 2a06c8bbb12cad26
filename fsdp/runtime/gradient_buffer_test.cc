// Compares with a slow reference that lays out the whole flat gradient and cuts
// it.
#include "fsdp/runtime/gradient_buffer.h"

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "fsdp/runtime/testing/runtime_unit.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;

using Tensors = std::vector<at::Tensor>;

// Returns parameters of every layout, some in several shards, some in none.
Tensors EveryKind(at::ScalarType dtype) {
  const auto options = at::TensorOptions(dtype);
  return {
      at::zeros({10, 3}, options),
      at::zeros({4, 6}, options).t(),
      at::zeros({2, 3, 2, 2}, options)
          .contiguous(at::MemoryFormat::ChannelsLast),
      at::zeros({}, options),
      at::zeros({0, 4}, options),
      at::zeros({61}, options),
      at::zeros({3, 1, 5}, options).permute({2, 0, 1}),
      at::zeros({1}, options),
  };
}

enum class Kind { kUndefined, kPlain, kExpanded, kTransposed, kSparse };
constexpr Kind kKinds[] = {Kind::kUndefined, Kind::kPlain, Kind::kExpanded,
                           Kind::kTransposed, Kind::kSparse};
constexpr int kNumKinds = 5;

// Returns a gradient of small integers, so that sums are exact in any order.
at::Tensor Gradient(const at::Tensor& parameter, Kind kind, int seed) {
  at::Tensor plain = at::arange(parameter.numel(), at::kLong)
                         .add(seed)
                         .remainder(7)
                         .view(parameter.sizes())
                         .to(parameter.scalar_type());
  switch (kind) {
    case Kind::kUndefined:
      return {};
    case Kind::kPlain:
      return plain;
    case Kind::kExpanded:
      return at::full({}, 1 + seed % 3, parameter.options())
          .expand(parameter.sizes());
    case Kind::kTransposed:
      if (parameter.dim() < 2) return plain;
      return plain.transpose(0, 1).contiguous().transpose(0, 1);
    case Kind::kSparse:
      if (parameter.dim() == 0) return plain;
      return plain.to_sparse(1);
  }
  return {};
}

// Gives parameters gradients of all kinds in turn.
Tensors Gradients(const Tensors& parameters, int first_kind) {
  Tensors gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int turn = first_kind + static_cast<int>(i);
    gradients.push_back(
        Gradient(parameters[i], kKinds[turn % kNumKinds], turn));
  }
  return gradients;
}

// One rank of a sharded unit.
struct Rank {
  Rank(const Tensors& tensors, int world_size, int rank)
      : flat(FlatOf(tensors, world_size, rank)),
        gradients(flat.get(), OptionsFor(*flat)) {}

  static GradientBufferOptions OptionsFor(const FlatParameter& flat) {
    return {flat.dtype(), flat.dtype(),
            MeanOver(flat.layout().world_size(), flat.dtype())};
  }

  // Returns a buffer that held NaN and is filled with `tensors`.
  at::Tensor Filled(const Tensors& tensors) const {
    const int64_t bytes = gradients.bytes();
    at::Tensor memory = at::full({bytes + 32}, 255, at::kByte);
    ReduceBuffer filled = Of(memory);
    gradients.Fill(filled, tensors);
    EXPECT_TRUE(memory.narrow(0, bytes, 32).eq(255).all().item<bool>())
        << "written behind its end";
    return memory;
  }

  // Returns `memory` as a buffer without a record of what was produced.
  ReduceBuffer Of(const at::Tensor& memory) const {
    return {gradients.CurrentLayout(), memory};
  }
  at::Tensor Whole(const at::Tensor& memory) const {
    return gradients.Whole(Of(memory));
  }
  at::Tensor OwnSegment(const at::Tensor& memory) const {
    return gradients.OwnSegment(Of(memory));
  }
  absl::Status AccumulateMean(const at::Tensor& memory) {
    return gradients.AccumulateMean(Of(memory));
  }
  bool TakeOver(at::Tensor& memory, const Produced& produced) {
    ReduceBuffer taken = Of(memory);
    taken.produced = produced;
    const bool is_taken = gradients.TakeOver(taken);
    memory = taken.memory;
    return is_taken;
  }

  std::unique_ptr<FlatParameter> flat;
  FlatGradients gradients;
};

at::Tensor ReferenceFlat(const FlatLayout& layout, const Tensors& gradients,
                         at::ScalarType dtype) {
  at::Tensor flat = at::zeros({layout.padded_numel()}, dtype);
  for (int i = 0; i < layout.num_parameters(); ++i) {
    if (!gradients[i].defined()) continue;
    const ParameterSpec& spec = layout.parameter(i);
    const Slice slice = layout.InFlat(i);
    at::Tensor view = flat.as_strided(spec.sizes, spec.strides, slice.begin);
    view.copy_(gradients[i].is_sparse() ? gradients[i].to_dense()
                                        : gradients[i]);
  }
  return flat;
}

// Returns all segments, each with a shard of the flat gradient, flags and
// zeros.
at::Tensor ReferenceBuffer(const FlatLayout& layout, const Tensors& gradients,
                           int64_t segment_numel, at::ScalarType dtype) {
  const at::Tensor flat = ReferenceFlat(layout, gradients, dtype);
  at::Tensor flags = at::zeros({segment_numel - layout.shard_numel()}, dtype);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    flags[static_cast<int64_t>(i)].fill_(1);
  }
  Tensors parts;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    parts.push_back(
        flat.narrow(0, rank * layout.shard_numel(), layout.shard_numel()));
    parts.push_back(flags);
  }
  return at::cat(parts);
}

class GradientBufferWorldTest : public ::testing::TestWithParam<int> {};

TEST_P(GradientBufferWorldTest, FillWritesEveryElementAsTheReferenceDoes) {
  const int world_size = GetParam();
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Tensors parameters = EveryKind(dtype);
    const Rank rank(parameters, world_size, world_size - 1);
    for (int first_kind = 0; first_kind < kNumKinds; ++first_kind) {
      SCOPED_TRACE(absl::StrCat(c10::toString(dtype), " ", first_kind));
      const Tensors gradients = Gradients(parameters, first_kind);
      const at::Tensor whole = rank.Whole(rank.Filled(gradients));
      const int64_t segment_numel = whole.numel() / world_size;
      EXPECT_EQ(segment_numel * world_size, whole.numel());
      EXPECT_TRUE(whole.equal(ReferenceBuffer(rank.flat->layout(), gradients,
                                              segment_numel, dtype)));
    }
  }
}

// Buffers of 5 MB are filled past the caches by several threads.
TEST_P(GradientBufferWorldTest, FillWritesEveryElementOfALargeBuffer) {
  const Tensors parameters = {at::zeros({3}), at::zeros({911, 701}),
                              at::zeros({5}), at::zeros({613000})};
  const Rank rank(parameters, GetParam(), 0);
  for (const Kind kind : {Kind::kPlain, Kind::kExpanded, Kind::kTransposed}) {
    Tensors gradients;
    for (size_t i = 0; i < parameters.size(); ++i) {
      gradients.push_back(Gradient(parameters[i], kind, static_cast<int>(i)));
    }
    const at::Tensor whole = rank.Whole(rank.Filled(gradients));
    ASSERT_GT(whole.nbytes(), 5e6 * 0.99);
    EXPECT_TRUE(
        whole.equal(ReferenceBuffer(rank.flat->layout(), gradients,
                                    whole.numel() / GetParam(), at::kFloat)));
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, GradientBufferWorldTest,
                         ::testing::Values(1, 2, 3, 5, 8));

// Tests one rank with three parameters; the mean is the gradient itself.
class AccumulateTest : public ::testing::Test {
 protected:
  // Accumulates gradients of these values; 0 means none.
  void Accumulate(float a, float b, float c) {
    Tensors gradients;
    for (float value : {a, b, c}) {
      gradients.push_back(value == 0 ? at::Tensor() : at::full({4}, value));
    }
    ASSERT_OK(rank_.AccumulateMean(rank_.Filled(gradients)));
  }
  // Returns the values as Accumulate() takes them.
  std::vector<float> Values() const {
    std::vector<float> values;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor& gradient = rank_.flat->ShardSlice(i).grad();
      values.push_back(gradient.defined() ? gradient[0].item<float>() : 0);
      if (!gradient.defined()) continue;
      EXPECT_TRUE(gradient.equal(at::full({4}, values.back())));
    }
    return values;
  }
  at::Tensor& MutableGrad(int i) {
    return rank_.flat->ShardSlice(i).mutable_grad();
  }
  void ZeroGrad() {
    for (int i = 0; i < 3; ++i) MutableGrad(i).reset();
  }

  Rank rank_{{at::zeros({4}), at::zeros({4}), at::zeros({4})}, 1, 0};
};

using ::testing::ElementsAre;

// Returns memory that is no larger than it has to be.
at::Tensor Exactly(const Rank& rank, const at::Tensor& memory) {
  return memory.narrow(0, 0, rank.gradients.bytes()).clone();
}

TEST_F(AccumulateTest, MemoryIsTakenOverForTheFormerOne) {
  const at::Tensor ones = at::ones({4});
  at::Tensor memory = Exactly(rank_, rank_.Filled({ones, {}, 3 * ones}));
  const void* const first = memory.data_ptr();
  EXPECT_TRUE(rank_.TakeOver(memory, {}));
  EXPECT_FALSE(memory.defined());
  EXPECT_THAT(Values(), ElementsAre(1, 0, 3));
  EXPECT_EQ(MutableGrad(0).data_ptr(), first);

  ZeroGrad();
  memory = Exactly(rank_, rank_.Filled({4 * ones, 5 * ones, 6 * ones}));
  const void* const second = memory.data_ptr();
  EXPECT_TRUE(rank_.TakeOver(memory, {true, true, true}));
  EXPECT_THAT(Values(), ElementsAre(4, 5, 6));
  EXPECT_EQ(MutableGrad(0).data_ptr(), second);
  EXPECT_EQ(memory.data_ptr(), first);
  EXPECT_EQ(memory.scalar_type(), at::kByte);
  EXPECT_EQ(static_cast<int64_t>(memory.nbytes()), rank_.gradients.bytes());
  Accumulate(10, 20, 30);
  EXPECT_THAT(Values(), ElementsAre(14, 25, 36));
}

TEST_F(AccumulateTest, WhatWasTakenOverIsGivenBackUnused) {
  const at::Tensor ones = at::ones({4});
  at::Tensor memory = Exactly(rank_, rank_.Filled({ones, ones, ones}));
  const void* const data = memory.data_ptr();
  EXPECT_TRUE(rank_.TakeOver(memory, {}));
  EXPECT_FALSE(rank_.gradients.DropUnused().defined());
  EXPECT_THAT(Values(), ElementsAre(1, 1, 1));
  ZeroGrad();
  const at::Tensor back = rank_.gradients.DropUnused();
  EXPECT_EQ(back.data_ptr(), data);
  EXPECT_EQ(static_cast<int64_t>(back.nbytes()), rank_.gradients.bytes());
  EXPECT_FALSE(rank_.gradients.DropUnused().defined());
  Accumulate(1, 2, 3);
  ZeroGrad();
  EXPECT_FALSE(rank_.gradients.DropUnused().defined());
}

TEST_F(AccumulateTest, AGradientThatTheUserKeepsIsNotGivenAway) {
  const at::Tensor ones = at::ones({4});
  at::Tensor memory = Exactly(rank_, rank_.Filled({ones, ones, ones}));
  EXPECT_TRUE(rank_.TakeOver(memory, {}));
  const at::Tensor kept = MutableGrad(1);
  ZeroGrad();
  memory = Exactly(rank_, rank_.Filled({ones, 2 * ones, ones}));
  EXPECT_TRUE(rank_.TakeOver(memory, {}));
  EXPECT_FALSE(memory.defined());
  EXPECT_TRUE(kept.equal(ones));
  EXPECT_THAT(Values(), ElementsAre(1, 2, 1));
}

TEST_F(AccumulateTest, WhatIsNoPlainCopyIsNotTakenOver) {
  const auto refuses = [](Rank& rank, at::Tensor memory) {
    const at::Tensor before = memory;
    EXPECT_FALSE(rank.TakeOver(memory, {}));
    EXPECT_TRUE(memory.is_same(before));
  };
  const at::Tensor ones = at::ones({4});
  const at::Tensor larger = rank_.Filled({ones, ones, ones});
  refuses(rank_, larger);
  Accumulate(1, 0, 0);
  refuses(rank_, Exactly(rank_, larger));
  ZeroGrad();
  rank_.gradients.SetScaling({1, 0.5});
  refuses(rank_, Exactly(rank_, larger));
  Rank of_two({ones, ones, ones}, /*world_size=*/2, /*rank=*/0);
  refuses(of_two, Exactly(of_two, of_two.Filled({ones, ones, ones})));
}

TEST_F(AccumulateTest, AfterZeroGradInPlaceStartsAtZero) {
  Accumulate(1, 2, 3);
  for (int i = 0; i < 3; ++i) MutableGrad(i).zero_();
  Accumulate(4, 5, 6);
  EXPECT_THAT(Values(), ElementsAre(4, 5, 6));
}

TEST_F(AccumulateTest, IntoTheUsersOwnAddsInPlace) {
  for (int i = 0; i < 3; ++i) MutableGrad(i) = at::full({4}, 100.f);
  const at::Tensor users = MutableGrad(0);
  Accumulate(1, 0, 3);
  EXPECT_THAT(Values(), ElementsAre(101, 100, 103));
  EXPECT_TRUE(MutableGrad(0).is_same(users));
  EXPECT_FALSE(rank_.gradients.values().defined())
      << "memory that nobody needs";
}

TEST_F(AccumulateTest, IntoOursTheUsersAndNothingAtOnce) {
  Accumulate(1, 2, 3);
  MutableGrad(1) = at::full({4}, 100.f);
  MutableGrad(2).reset();
  Accumulate(10, 20, 30);
  EXPECT_THAT(Values(), ElementsAre(11, 120, 30));
  Accumulate(1, 1, 1);
  EXPECT_THAT(Values(), ElementsAre(12, 121, 31));
}

TEST_F(AccumulateTest, TakesAFlagForProducedWhateverTheSumOverRanks) {
  at::Tensor memory = rank_.Filled({at::ones({4}), {}, {}});
  at::Tensor segment = rank_.OwnSegment(memory);
  segment.narrow(0, rank_.flat->layout().shard_numel(), 1).fill_(1000);
  ASSERT_OK(rank_.AccumulateMean(memory));
  EXPECT_THAT(Values(), ElementsAre(1, 0, 0));
}

TEST(GradientBufferTest, UnitWithoutElementsStillCarriesFlags) {
  Rank rank({at::zeros({0, 3})}, 2, 1);
  ASSERT_OK(rank.AccumulateMean(rank.Filled({at::zeros({0, 3})})));
  EXPECT_TRUE(rank.flat->ShardSlice(0).grad().defined());
}

TEST(GradientBufferDeathTest, OtherNumberOfGradientsStopsTheProgram) {
  const Rank rank({at::zeros({4})}, 1, 0);
  EXPECT_DEATH(rank.Filled({}), "num_parameters");
}

}  // namespace
}  // namespace fsdp::testing
