// Tests CUDA's kernels, compiled for the host: they compute what the CPU's do,
// whatever the order of blocks and threads.
#include <ATen/ops/full.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/testing/fake_device.h"
#include "device_ops/block_quantization.h"
#include "device_ops/cuda/device.cuh"
#include "device_ops/cuda/kernels.h"
#include "device_ops/row_layout.h"
#include "device_ops/testing/host_cuda/kernel_machine.h"
#include "device_ops/testing/operator_cases.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::cuda {
namespace {

using ::fsdp::device_ops::testing::Difference;
using ::fsdp::device_ops::testing::KernelMachine;
using ::fsdp::device_ops::testing::OperatorsTest;
using ::fsdp::device_ops::testing::Order;
using ::fsdp::device_ops::testing::RandomNumbers;
using ::fsdp::device_ops::testing::TestedDevice;
using ::fsdp::testing::FakeDevice;

TestedDevice InOrder(const char* name, Order order) {
  return {name, c10::Device(c10::kPrivateUse1, 0),
          [order] {
            FakeDevice::Register();
            KernelMachine::Get().set_order(order);
          },
          /*max_numel=*/65537, /*max_blocks=*/100};
}

INSTANTIATE_TEST_SUITE_P(
    OnHost, OperatorsTest,
    ::testing::Values(InOrder("forward", Order::kForward),
                      InOrder("reversed", Order::kReversed),
                      InOrder("shuffled", Order::kShuffled)),
    [](const auto& info) { return info.param.name; });

class KernelsOnHostTest : public ::testing::Test {
 protected:
  KernelsOnHostTest() {
    FakeDevice::Register();
    KernelMachine::Get().set_order(Order::kForward);
    KernelMachine::Get().launches().clear();
  }
};

// Memory that takes none until it is written.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        memory_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() { munmap(memory_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  template <typename T>
  T* As() const {
    return static_cast<T*>(memory_);
  }
  bool there() const { return memory_ != MAP_FAILED; }

 private:
  const size_t bytes_;
  void* const memory_;
};

constexpr int64_t kFar = (int64_t{1} << 33) + 24;  // elements

TEST_F(KernelsOnHostTest, PieceBehindWhat32BitsCount) {
  const SparseMemory memory((kFar + 10'000) * sizeof(float));
  ASSERT_TRUE(memory.there());
  float* const out = memory.As<float>();
  const at::Tensor source = RandomNumbers(at::kFloat, 9'000, 1);
  const float* const numbers = source.const_data_ptr<float>();
  const PackItem item = {numbers, Element::kFloat, kFar, 9'000, 0};
  ASSERT_EQ(LaunchPack(&item, 1, Element::kFloat, out, 0.5, false, nullptr),
            cudaSuccess);
  for (int64_t i = 0; i < 9'000; ++i) {
    ASSERT_EQ(out[kFar + i], 0.5f * numbers[i]) << i;
  }
  EXPECT_EQ(out[kFar - 1], 0);
  EXPECT_EQ(out[kFar + 9'000], 0);
}

TEST_F(KernelsOnHostTest, RowsFartherApartThan32BitsCount) {
  constexpr int64_t kNumel = 104;
  constexpr int64_t kBlock = 8;
  constexpr int64_t kScales = 13;
  const SparseMemory numbers((kFar + kNumel) * sizeof(float));
  const SparseMemory bytes(kFar + kNumel);
  const SparseMemory scales((kFar + kScales) * sizeof(float));
  ASSERT_TRUE(numbers.there() && bytes.there() && scales.there());
  const at::Tensor in = RandomNumbers(at::kFloat, 2 * kNumel, 1).view({2, -1});
  for (int64_t row : {0, 1}) {
    std::copy_n(in[row].const_data_ptr<float>(), kNumel,
                numbers.As<float>() + row * kFar);
  }
  ASSERT_EQ(LaunchQuantize({2, 1, kNumel, kBlock, kFar, kFar, 0, kFar, 0},
                           Element::kFloat, numbers.As<float>(),
                           bytes.As<int8_t>(), scales.As<float>(), nullptr),
            cudaSuccess);
  const at::Tensor values = at::full({2, kNumel}, 0, at::kChar);
  const at::Tensor expected_scales = at::full({2, kScales}, 0, at::kFloat);
  Quantize(in, kBlock, values, expected_scales);
  const at::Tensor expected = at::full({2, kNumel}, 0, at::kFloat);
  const float* const wanted = expected.const_data_ptr<float>();
  const int8_t* const wanted_bytes = values.const_data_ptr<int8_t>();
  Dequantize(expected, values, expected_scales, kBlock);
  for (int64_t row : {0, 1}) {
    for (int64_t i = 0; i < kNumel; ++i) {
      ASSERT_EQ(bytes.As<int8_t>()[row * kFar + i],
                wanted_bytes[row * kNumel + i]);
    }
  }
  // The numbers come as rows, then as the terms of a sum.
  ASSERT_EQ(
      LaunchDequantize({2, 1, kNumel, kBlock, kFar, kFar, 0, kFar, 0},
                       Element::kFloat, numbers.As<float>(), bytes.As<int8_t>(),
                       scales.As<float>(), 1, false, nullptr),
      cudaSuccess);
  for (int64_t row : {0, 1}) {
    for (int64_t i = 0; i < kNumel; ++i) {
      ASSERT_EQ(numbers.As<float>()[row * kFar + i], wanted[row * kNumel + i]);
    }
  }
  ASSERT_EQ(
      LaunchDequantize({1, 2, kNumel, kBlock, 0, 0, kFar, 0, kFar},
                       Element::kFloat, numbers.As<float>(), bytes.As<int8_t>(),
                       scales.As<float>(), 1, false, nullptr),
      cudaSuccess);
  for (int64_t i = 0; i < kNumel; ++i) {
    ASSERT_EQ(numbers.As<float>()[i], wanted[i] + wanted[kNumel + i]);
  }
}

// A launch has 128 blocks of 256 threads at most, 8 times what two
// multiprocessors run at once: 1024 warps to quantise by.
TEST_F(KernelsOnHostTest, MoreNumbersThanThreads) {
  constexpr int64_t kNumel = 3 * 128 * 256 + 1'000;
  constexpr int64_t kBlock = 33;
  const at::Tensor in = RandomNumbers(at::kBFloat16, kNumel, 1);
  const at::Tensor values = at::full({2, kNumel}, 99, at::kChar);
  const at::Tensor scales =
      at::full({2, NumBlocks(kNumel, kBlock)}, 99, at::kFloat);
  Quantize(in, kBlock, values[0], scales[0]);
  ASSERT_EQ(LaunchQuantize(RowsOf(in.unsqueeze(0), values.narrow(0, 1, 1),
                                  scales.narrow(0, 1, 1), kBlock),
                           Element::kBFloat16, in.const_data_ptr(),
                           values[1].mutable_data_ptr<int8_t>(),
                           scales[1].mutable_data_ptr<float>(), nullptr),
            cudaSuccess);
  EXPECT_EQ(KernelMachine::Get().launches().back().gridDim.x, 128u);
  EXPECT_EQ(Difference(values[1], values[0]), "");
  EXPECT_EQ(Difference(scales[1], scales[0]), "");
  const at::Tensor out = at::full({2, kNumel}, 7, at::kBFloat16);
  Dequantize(out[0], values[0], scales[0], kBlock);
  ASSERT_EQ(LaunchDequantize(
                RowsOf(out.narrow(0, 1, 1), values.narrow(0, 0, 1).unsqueeze(0),
                       scales.narrow(0, 0, 1).unsqueeze(0), kBlock),
                Element::kBFloat16, out[1].mutable_data_ptr(),
                values.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(),
                1, false, nullptr),
            cudaSuccess);
  EXPECT_EQ(KernelMachine::Get().launches().back().gridDim.x, 128u);
  EXPECT_EQ(Difference(out[1], out[0]), "");
}

TEST_F(KernelsOnHostTest, LaunchesAreOnTheStreamAndAsFewAsCanBe) {
  const auto stream = reinterpret_cast<cudaStream_t>(0x77);
  float out[2100] = {};
  float source[2100] = {};
  std::vector<PackItem> items;
  for (int64_t i = 0; i < 2100; ++i) {
    items.push_back({&source[i], Element::kFloat, i, 1, 0});
  }
  auto& launches = KernelMachine::Get().launches();
  for (const auto& [count, expected] : {std::pair<int64_t, size_t>{0, 0},
                                        {1, 1},
                                        {1024, 1},
                                        {1025, 2},
                                        {2100, 3}}) {
    launches.clear();
    EXPECT_EQ(
        LaunchPack(items.data(), count, Element::kFloat, out, 1, false, stream),
        cudaSuccess);
    EXPECT_EQ(launches.size(), expected) << count;
    for (const auto& launch : launches) EXPECT_EQ(launch.stream, stream);
  }
  int8_t value = 1;
  launches.clear();
  EXPECT_EQ(LaunchQuantize({1, 1, 1, 1, 1, 1, 1, 1, 1}, Element::kFloat, source,
                           &value, out, stream),
            cudaSuccess);
  EXPECT_EQ(LaunchDequantize({1, 1, 1, 1, 1, 1, 1, 1, 1}, Element::kFloat, out,
                             &value, source, 1, false, stream),
            cudaSuccess);
  ASSERT_EQ(launches.size(), 2u);
  const int64_t target = 0;
  const RotatedHeads heads = {1,      1,      1,      1,   {1, 1, 1}, {1, 1, 1},
                              source, source, source, out, false};
  const RotatedHeads no_heads = {};
  for (const int64_t numel : {0, 1}) {
    EXPECT_EQ(
        LaunchRotate(numel == 0 ? no_heads : heads, Element::kFloat, stream),
        cudaSuccess);
    EXPECT_EQ(LaunchSwiGlu(numel, Element::kFloat, source, source, out, stream),
              cudaSuccess);
    EXPECT_EQ(LaunchSwiGluBackward(numel, Element::kFloat, source, source,
                                   source, out, out + 1, stream),
              cudaSuccess);
    EXPECT_EQ(LaunchCrossEntropy(numel, 1, Element::kFloat, out, &target, -1,
                                 true, out + 1, stream),
              cudaSuccess);
    EXPECT_EQ(launches.size(), numel == 0 ? 2u : 6u);
  }
  for (const auto& launch : launches) EXPECT_EQ(launch.stream, stream);
}

TEST_F(KernelsOnHostTest, TargetsOutsideOfTheClassesHaveTheLossNan) {
  float logits[] = {1, 2, 3, 3, 2, 1};
  float losses[] = {0, 0};
  const int64_t targets[] = {3, -2};
  ASSERT_EQ(LaunchCrossEntropy(2, 3, Element::kFloat, logits, targets, -1, true,
                               losses, nullptr),
            cudaSuccess);
  for (const float loss : losses) EXPECT_TRUE(std::isnan(loss));
  EXPECT_FLOAT_EQ(logits[0] + logits[1] + logits[2], 1);
}

// Nothing outside of a source is read, which the sanitizer of addresses sees,
// whatever the places of the two sides and however short a piece is.
TEST_F(KernelsOnHostTest, ShortPiecesAtAllPlaces) {
  for (int64_t numel = 1; numel < 70; numel += numel < 40 ? 1 : 7) {
    for (int64_t from = 0; from < 8; ++from) {
      for (int64_t to = 0; to < 8; ++to) {
        const at::Tensor whole = RandomNumbers(at::kBFloat16, numel, 1);
        // The source ends where the memory does.
        const std::unique_ptr<uint16_t[]> source(new uint16_t[from + numel]);
        std::copy_n(static_cast<const uint16_t*>(whole.const_data_ptr()), numel,
                    source.get() + from);
        ASAN_POISON_MEMORY_REGION(source.get(), from * sizeof(uint16_t));
        const at::Tensor out = at::full({numel + 16}, 77, at::kBFloat16);
        const at::Tensor expected = out.clone();
        expected.narrow(0, to, numel).copy_(whole.mul(0.5));
        const PackItem item = {source.get() + from, Element::kBFloat16, to,
                               numel, 0};
        ASSERT_EQ(LaunchPack(&item, 1, Element::kBFloat16,
                             out.mutable_data_ptr(), 0.5, false, nullptr),
                  cudaSuccess);
        ASAN_UNPOISON_MEMORY_REGION(source.get(), from * sizeof(uint16_t));
        ASSERT_EQ(Difference(out, expected), "")
            << numel << " " << from << " " << to;
      }
    }
  }
}

TEST(DividerTest, DividesAsTheProcessorDoes) {
  std::vector<int64_t> numbers;
  for (int shift = 0; shift < 63; ++shift) {
    for (int64_t near : {-2, -1, 0, 1, 2}) {
      const int64_t number = (int64_t{1} << shift) + near;
      if (number >= 0) numbers.push_back(number);
    }
  }
  for (int64_t number = 0; number < 300; ++number) numbers.push_back(number);
  for (int64_t number : {1'000'003LL, 123'456'789'012'345LL, 6'700'417LL}) {
    numbers.push_back(number);
  }
  numbers.push_back(std::numeric_limits<int64_t>::max());
  for (int64_t divisor : numbers) {
    if (divisor == 0) continue;
    const Divider divider(divisor);
    for (int64_t number : numbers) {
      ASSERT_EQ(divider.Quotient(number), number / divisor)
          << number << " / " << divisor;
      // The quotient changes here.
      const int64_t multiple = number - number % divisor;
      ASSERT_EQ(divider.Quotient(multiple), multiple / divisor);
      if (multiple == 0) continue;
      ASSERT_EQ(divider.Quotient(multiple - 1), (multiple - 1) / divisor);
    }
  }
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
