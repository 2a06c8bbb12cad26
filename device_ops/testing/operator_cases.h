// What the operators are tried on, and how results are compared.
#ifndef DEVICE_OPS_TESTING_OPERATOR_CASES_H_
#define DEVICE_OPS_TESTING_OPERATOR_CASES_H_

#include <ATen/core/Tensor.h>

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

// Normally distributed numbers, on the CPU, over many magnitudes: with zeros of
// both signs and subnormal numbers.
at::Tensor RandomNumbers(at::ScalarType dtype, int64_t size, int seed);

// Equal bits, any NaN being like any other: "" or where they differ.
std::string Difference(const at::Tensor& actual, const at::Tensor& expected);

// Sources of all dtypes, of `size` and of some elements, in pieces that follow
// each other in a mixed order, none of them aligned, with zeros and ones
// between them.
struct PackCase {
  std::vector<at::Tensor> sources;
  Packing packing;
  int64_t out_size = 0;
};
PackCase MakePackCase(int64_t size, int pieces);

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_OPERATOR_CASES_H_
