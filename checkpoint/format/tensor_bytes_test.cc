#include "checkpoint/format/tensor_bytes.h"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

at::Tensor Values(int64_t numel, c10::ScalarType dtype) {
  return at::arange(numel, at::kDouble).sub(3.3).mul(1.7).to(dtype);
}

std::string MemoryOf(const at::Tensor& tensor) {
  return std::string(static_cast<const char*>(tensor.const_data_ptr()),
                     tensor.nbytes());
}

constexpr c10::ScalarType kDtypes[] = {c10::kFloat, c10::kBFloat16, c10::kHalf,
                                       c10::kDouble};

// However the bytes are asked for, they are those of the cast tensor.
TEST(ReadElementsTest, AnyPiecesOfAnyCast) {
  for (const c10::ScalarType from : kDtypes) {
    for (const c10::ScalarType to : kDtypes) {
      const at::Tensor values = Values(23, from);
      const std::string expected = MemoryOf(values.to(to));
      const auto all = static_cast<int64_t>(expected.size());
      for (const int64_t step : {1, 3, 7, 64, 1000}) {
        std::string bytes(expected.size(), '?');
        for (int64_t at = 0; at < all; at += step) {
          const int64_t size = std::min(step, all - at);
          EXPECT_OK(
              ReadElements(values, to, at, absl::MakeSpan(&bytes[at], size)));
        }
        EXPECT_EQ(bytes, expected) << from << " " << to << " " << step;
      }
    }
  }
}

TEST(TensorBytesTest, WhatWouldBecomeInfiniteIsRefused) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor values =
      at::tensor({kInfinity, 1.0, -3.4e38, 2.0}, at::kDouble);
  std::string bytes(32, '?');
  const auto read = [&](const at::Tensor& from, c10::ScalarType to) {
    const auto size = from.numel() * c10::elementSize(to);
    return ReadElements(from, to, 0, absl::MakeSpan(bytes).first(size));
  };
  const auto refuses = StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("the value -3.4e+38, which would "
                                          "become infinite in"));
  EXPECT_OK(read(values, c10::kFloat));
  EXPECT_THAT(read(values, c10::kBFloat16), refuses);
  EXPECT_THAT(read(values.to(c10::kFloat), c10::kBFloat16), refuses);
  EXPECT_THAT(read(values.to(c10::kFloat), c10::kHalf), refuses);
  // Infinite it was before.
  EXPECT_OK(read(values.to(c10::kBFloat16), c10::kHalf));
  const auto write = [&](c10::ScalarType from, c10::ScalarType to) {
    TensorSink sink(at::zeros({4}, to), from);
    return sink.Write(0, MemoryOf(values.to(from)));
  };
  EXPECT_OK(write(c10::kDouble, c10::kFloat));
  EXPECT_THAT(write(c10::kDouble, c10::kBFloat16), refuses);
  EXPECT_THAT(write(c10::kFloat, c10::kHalf), refuses);
  EXPECT_OK(write(c10::kBFloat16, c10::kHalf));
}

TEST(ReadElementsTest, NothingAndStridesAndNonFloats) {
  EXPECT_OK(ReadElements(at::empty({0}), c10::kFloat, 0, {}));
  const at::Tensor strided = Values(20, c10::kLong).view({10, 2}).select(1, 1);
  std::string bytes(80, '?');
  EXPECT_OK(ReadElements(strided, c10::kLong, 0, absl::MakeSpan(bytes)));
  EXPECT_EQ(bytes, MemoryOf(strided.contiguous()));
}

// Whose bytes in memory are not its values.
std::vector<at::Tensor> Lazy() {
  const at::Tensor parts = Values(46, c10::kFloat).view({23, 2});
  return {at::view_as_complex(parts).conj(),
          at::imag(at::view_as_complex(parts).conj()),
          at::_neg_view(Values(23, c10::kFloat))};
}

at::Tensor Plain(const at::Tensor& values) {
  at::Tensor plain = at::zeros(values.sizes(), values.options());
  plain.copy_(values);
  return plain;
}

TEST(ReadElementsTest, LazyConjugationAndNegationCount) {
  for (const at::Tensor& values : Lazy()) {
    ASSERT_TRUE(values.is_conj() || values.is_neg());
    std::string bytes(values.nbytes(), '?');
    EXPECT_OK(
        ReadElements(values, values.scalar_type(), 0, absl::MakeSpan(bytes)));
    EXPECT_EQ(bytes, MemoryOf(Plain(values)));
  }
}

TEST(TensorSinkTest, LazyConjugationAndNegationCount) {
  for (const at::Tensor& values : Lazy()) {
    const at::Tensor expected = Plain(values).add(1);
    const std::string bytes = MemoryOf(expected);
    EXPECT_OK(TensorSink(values, values.scalar_type()).Write(0, bytes));
    EXPECT_TRUE(values.is_conj() || values.is_neg());
    EXPECT_TRUE(at::equal(Plain(values), expected));
  }
}

TEST(TensorSinkTest, AnyPiecesOfAnyCast) {
  for (const c10::ScalarType file : kDtypes) {
    for (const c10::ScalarType own : kDtypes) {
      const at::Tensor in_file = Values(23, file);
      const std::string bytes = MemoryOf(in_file);
      for (const size_t step : {1, 3, 7, 64, 1000}) {
        const at::Tensor values = at::zeros({23}, own);
        TensorSink sink(values, file);
        for (size_t at = 0; at < bytes.size(); at += step) {
          EXPECT_OK(sink.Write(static_cast<int64_t>(at),
                               absl::MakeConstSpan(bytes).subspan(at, step)));
        }
        EXPECT_TRUE(at::equal(values, in_file.to(own)))
            << file << " " << own << " " << step;
      }
    }
  }
}

// A device takes what is page-locked, and the host waits for it only where it
// has to see values, or elements in pieces.
TEST(TensorSinkTest, ADeviceCastsAsTheCpuDoes) {
  FakeDevice::Register();
  for (const c10::ScalarType file : kDtypes) {
    for (const c10::ScalarType own : kDtypes) {
      const bool looks =
          file != own && c10::elementSize(file) >= c10::elementSize(own);
      for (const size_t step : {7, 1000}) {
        const at::Tensor in_file = Values(23, file);
        const auto size = static_cast<int64_t>(in_file.nbytes());
        const absl::Span<const char> bytes(
            static_cast<const char*>(in_file.const_data_ptr()), size);
        FakeDevice::Pin(in_file.mutable_data_ptr(), size);
        const at::Tensor values = at::zeros(
            {23}, at::TensorOptions(own).device(FakeDevice::device()));
        FakeDevice::Reset();
        TensorSink sink(values, file);
        for (size_t at = 0; at < bytes.size(); at += step) {
          EXPECT_OK(
              sink.Write(static_cast<int64_t>(at), bytes.subspan(at, step)));
        }
        EXPECT_EQ(FakeDevice::HostWaits().empty(), step == 1000 && !looks)
            << file << " " << own << " " << step;
        EXPECT_TRUE(at::equal(values.cpu(), in_file.to(own)))
            << file << " " << own << " " << step;
        FakeDevice::Unpin(in_file.mutable_data_ptr());
        EXPECT_THAT(FakeDevice::Races(), ::testing::IsEmpty());
      }
    }
  }
}

// Those who watch a tensor see that it was written.
TEST(TensorSinkTest, CountsAsAWrite) {
  at::Tensor values = at::zeros({4});
  values.set_requires_grad(true);
  const auto before = values._version();
  const std::string bytes(16, '\0');
  EXPECT_OK(TensorSink(values, c10::kFloat).Write(0, bytes));
  EXPECT_GT(values._version(), before);
}

TEST(TorchDtypeTest, ThereAndBackWithElementsOfOneSize) {
  int shared = 0;
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const auto torch = TorchDtype(dtype);
    if (!torch.has_value()) {
      // Those that do not fill bytes are all that LibTorch lacks.
      EXPECT_EQ(ItemBytes(dtype), 0) << NameOf(dtype);
      continue;
    }
    ++shared;
    EXPECT_EQ(FileDtype(*torch), dtype) << NameOf(dtype);
    EXPECT_EQ(static_cast<int64_t>(c10::elementSize(*torch)), ItemBytes(dtype))
        << NameOf(dtype);
  }
  EXPECT_EQ(shared, 19);
}

TEST(TorchDtypeTest, NamesAgree) {
  EXPECT_EQ(FileDtype(c10::kBFloat16), Dtype::kBF16);
  EXPECT_EQ(FileDtype(c10::kHalf), Dtype::kF16);
  EXPECT_EQ(FileDtype(c10::kFloat8_e4m3fn), Dtype::kF8E4M3);
  EXPECT_EQ(FileDtype(c10::kFloat8_e4m3fnuz), Dtype::kF8E4M3Fnuz);
  EXPECT_EQ(FileDtype(c10::kComplexFloat), Dtype::kC64);
  EXPECT_FALSE(FileDtype(c10::kComplexDouble).has_value());
  EXPECT_FALSE(FileDtype(c10::kQInt8).has_value());
}

}  // namespace
}  // namespace fsdp::checkpoint
