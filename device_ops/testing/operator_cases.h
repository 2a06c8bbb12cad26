// Inputs of the operators, the comparison of results, and the devices whose
// kernels are tested.
#ifndef DEVICE_OPS_TESTING_OPERATOR_CASES_H_
#define DEVICE_OPS_TESTING_OPERATOR_CASES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "device_ops/pack.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                      at::kBFloat16};
constexpr int64_t kSizes[] = {0,  1,   2,    7,    8,     9,
                              31, 257, 1021, 4096, 65537, 1'000'003};
constexpr double kScales[] = {1, 0.125, 1.0 / 3};

// Returns normally distributed numbers on the CPU, of many magnitudes, with
// zeros of both signs and subnormal numbers.
at::Tensor RandomNumbers(at::ScalarType dtype, int64_t size, int seed);

// Returns "" if the bits are equal, any NaN being like any other, or where they
// differ.
std::string Difference(const at::Tensor& actual, const at::Tensor& expected);

// Sources of all dtypes, some of `size` elements and some of few. Their pieces
// follow each other in a mixed order, unaligned, with zeros and ones between
// them.
struct PackCase {
  std::vector<at::Tensor> sources;
  Packing packing;
  int64_t out_size = 0;
};
PackCase MakePackCase(int64_t size, int pieces);

// Return what the operators of fused_layers.h of these names are to compute, by
// operators of LibTorch that autograd records.
at::Tensor PlainRotation(const at::Tensor& x, const at::Tensor& cos,
                         const at::Tensor& sin);
at::Tensor PlainSwiGlu(const at::Tensor& gate, const at::Tensor& up);

// Expect that results of those operators on `device`, and their gradients, are
// those of LibTorch's in float64, rounded once to `dtype`, but for errors of
// 1e-6 where that is not float64 itself. Sizes, the places of tensors in memory
// and their strides vary.
void ExpectRotationsRoundOnce(c10::Device device, c10::ScalarType dtype);
void ExpectSwiGlusRoundOnce(c10::Device device, c10::ScalarType dtype);
void ExpectCrossEntropiesRoundOnce(c10::Device device, c10::ScalarType dtype);

struct TestedDevice {
  const char* name;
  c10::Device device;
  std::function<void()> prepare;  // before each test
  int64_t max_numel;              // of a packed tensor
  int64_t max_blocks;             // of a quantised tensor
};

inline std::ostream& operator<<(std::ostream& out, const TestedDevice& tested) {
  return out << tested.name;
}

// Compares a device's kernels with the CPU's, bit by bit, and those of
// fused_layers.h with float64. A test links :operator_checks and names its
// devices:
//
//   INSTANTIATE_TEST_SUITE_P(Name, OperatorsTest, ::testing::Values(...));
class OperatorsTest : public ::testing::TestWithParam<TestedDevice> {
 protected:
  void SetUp() override { GetParam().prepare(); }
};

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_OPERATOR_CASES_H_
