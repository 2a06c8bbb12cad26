// Inputs of the operators, and the comparison of results.
#ifndef DEVICE_OPS_TESTING_OPERATOR_CASES_H_
#define DEVICE_OPS_TESTING_OPERATOR_CASES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_ops/pack.h"

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

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_OPERATOR_CASES_H_
