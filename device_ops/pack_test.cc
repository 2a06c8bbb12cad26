#include "device_ops/pack.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/testing/fake_device.h"
#include "device_ops/testing/operator_cases.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

using ::fsdp::testing::FakeDevice;
using testing::Difference;
using testing::kDtypes;
using testing::kScales;
using testing::kSizes;
using testing::MakePackCase;
using testing::PackCase;
using testing::RandomNumbers;

at::Tensor Marked(at::ScalarType dtype, int64_t size) {
  return at::full({size}, 77, at::TensorOptions().dtype(dtype));
}

at::ScalarType WiderOf(at::ScalarType a, at::ScalarType b) {
  return a == at::kDouble || b == at::kDouble ? at::kDouble : at::kFloat;
}

// Scales by operators of LibTorch that do one thing each, in the wider dtype.
at::Tensor Scaled(const at::Tensor& in, at::ScalarType to, double scale) {
  const at::ScalarType wider = WiderOf(in.scalar_type(), to);
  return in.to(wider).mul(at::full({}, scale, wider)).to(to);
}

at::Tensor Added(const at::Tensor& out, const at::Tensor& in, double scale) {
  const at::ScalarType wider = WiderOf(in.scalar_type(), out.scalar_type());
  const at::Tensor product = in.to(wider).mul(at::full({}, scale, wider));
  return out.to(wider).add(product).to(out.scalar_type());
}

// Returns what Pack() is to leave, piece by piece.
at::Tensor Reference(const PackCase& test, at::Tensor out, double scale,
                     bool accumulate) {
  const c10::IntArrayRef pieces = test.packing.pieces();
  for (size_t i = 0; i < pieces.size(); i += 4) {
    const at::Tensor to = out.narrow(0, pieces[i + 2], pieces[i + 3]);
    if (pieces[i] < 0) {
      to.fill_(pieces[i] == Packing::kOnes ? 1 : 0);
      continue;
    }
    const at::Tensor from =
        test.sources[pieces[i]].narrow(0, pieces[i + 1], pieces[i + 3]);
    to.copy_(accumulate ? Added(to, from, scale)
                        : Scaled(from, out.scalar_type(), scale));
  }
  return out;
}

TEST(PackTest, WritesPiecesOfEveryDtypeIntoEveryDtype) {
  for (int64_t size : kSizes) {
    const PackCase test = MakePackCase(size, size < 1000 ? 5 : 23);
    for (at::ScalarType dtype : kDtypes) {
      for (double scale : kScales) {
        const at::Tensor out = Marked(dtype, test.out_size);
        Pack(out, test.sources, test.packing, scale);
        EXPECT_EQ(Difference(out, Reference(test, Marked(dtype, test.out_size),
                                            scale, false)),
                  "")
            << dtype << " " << size << " " << scale;
      }
    }
  }
}

TEST(PackTest, AddsPiecesAndWritesRanges) {
  for (int64_t size : kSizes) {
    const PackCase test = MakePackCase(size, size < 1000 ? 5 : 23);
    for (at::ScalarType dtype : kDtypes) {
      const at::Tensor before = RandomNumbers(dtype, test.out_size, 9);
      const at::Tensor out = before.clone();
      Pack(out, test.sources, test.packing, 1.0 / 3, /*accumulate=*/true);
      EXPECT_EQ(Difference(out, Reference(test, before, 1.0 / 3, true)), "")
          << dtype << " " << size;
    }
  }
}

// Devices without kernels pack by operators of LibTorch.
TEST(PackTest, HasTheSameBitsOnOtherDevices) {
  FakeDevice::Register();
  for (int64_t size : {0, 1, 257, 1021}) {
    const PackCase test = MakePackCase(size, 11);
    std::vector<at::Tensor> sources;
    sources.reserve(test.sources.size());
    for (const at::Tensor& source : test.sources) {
      sources.push_back(source.to(FakeDevice::device()));
    }
    for (at::ScalarType dtype : kDtypes) {
      for (double scale : kScales) {
        const at::Tensor expected = Marked(dtype, test.out_size);
        const at::Tensor out = expected.to(FakeDevice::device());
        Pack(expected, test.sources, test.packing, scale);
        Pack(out, sources, test.packing, scale);
        EXPECT_EQ(Difference(out.cpu(), expected), "")
            << dtype << " " << size << " " << scale;
      }
      const at::Tensor expected = Marked(dtype, test.out_size);
      const at::Tensor out = expected.to(FakeDevice::device());
      Pack(expected, test.sources, test.packing, 2, /*accumulate=*/true);
      Pack(out, sources, test.packing, 2, /*accumulate=*/true);
      EXPECT_EQ(Difference(out.cpu(), expected), "") << dtype << " " << size;
    }
  }
}

TEST(PackTest, NothingToDoIsDone) {
  Pack(Marked(at::kFloat, 0), {}, Packing(), 1);
  Pack(Marked(at::kHalf, 3), {}, Packing(), 0.5, /*accumulate=*/true);
}

// Ranges may come in any order and have any length, but no cell may be taken
// twice.
TEST(PackingTest, RangesAreDisjoint) {
  const std::vector<std::pair<int64_t, int64_t>> ranges = {
      {0, 2}, {2, 3}, {3, 3}, {4, 6}, {6, 8}};
  std::vector<size_t> order = {0, 1, 2, 3, 4};
  do {
    Packing packing;
    for (size_t i : order) packing.AddZeros(ranges[i].first, ranges[i].second);
    packing.AddPiece(0, 0, 3, 1);
    EXPECT_EQ(packing.pieces().size(), 4 * (ranges.size() + 1));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(PackingTest, OverlapsAreBugs) {
  for (const auto& [begin, numel] : {std::pair<int64_t, int64_t>{3, 2},
                                     {4, 1},
                                     {5, 2},
                                     {2, 9},
                                     {9, 2},
                                     {11, 2},
                                     {0, 5}}) {
    Packing packing;
    packing.AddOnes(10, 12);
    packing.AddZeros(4, 6);
    packing.AddPiece(0, 0, 6, 3);
    EXPECT_DEATH(packing.AddPiece(0, 0, begin, numel), "end") << begin;
    EXPECT_DEATH(packing.AddOnes(begin, begin + numel), "end") << begin;
    EXPECT_DEATH(packing.AddZeros(begin, begin + numel), "end") << begin;
  }
}

TEST(PackTest, IsNotRecordedForAutograd) {
  at::Tensor source = RandomNumbers(at::kFloat, 3, 1);
  source.requires_grad_();
  Packing packing;
  packing.AddPiece(0, 0, 0, 3);
  const at::Tensor out = Marked(at::kFloat, 3);
  const auto version = out._version();
  Pack(out, {source}, packing, 0.5);
  EXPECT_FALSE(out.requires_grad());
  EXPECT_EQ(out._version(), version);
}

TEST(PackTest, RefusesOtherDtypes) {
  Packing packing;
  packing.AddOnes(0, 1);
  EXPECT_THROW(Pack(Marked(at::kInt, 3), {}, packing, 1), c10::Error);
}

TEST(CopyScaledTest, HasTheBitsOfLibTorchsOperators) {
  for (int64_t size : kSizes) {
    for (at::ScalarType from : kDtypes) {
      const at::Tensor in = RandomNumbers(from, size, 3);
      for (at::ScalarType to : kDtypes) {
        for (double scale : kScales) {
          const at::Tensor out = Marked(to, size);
          CopyScaled(out, in, scale);
          EXPECT_EQ(Difference(out, Scaled(in, to, scale)), "")
              << from << " to " << to << " " << size << " " << scale;
        }
      }
    }
  }
}

TEST(AddScaledTest, AddsInTheWiderDtype) {
  for (int64_t size : kSizes) {
    for (at::ScalarType from : kDtypes) {
      const at::Tensor in = RandomNumbers(from, size, 5);
      for (at::ScalarType to : kDtypes) {
        const at::Tensor before = RandomNumbers(to, size, 6);
        const at::Tensor out = before.clone();
        // The product is exact, so that it does not matter whether it is
        // rounded; twice a half may be too large for one.
        const double scale = from == to ? -1 : 2;
        CopyScaled(out, in, scale, /*accumulate=*/true);
        EXPECT_EQ(Difference(out, Added(before, in, scale)), "")
            << from << " to " << to << " " << size;
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::device_ops
