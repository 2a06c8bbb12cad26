// Compares a device's kernels with the CPU's, bit by bit, and those of
// fused_layers.h with float64. A test links operator_checks and names its
// devices:
//
//   INSTANTIATE_TEST_SUITE_P(Name, OperatorsTest, ::testing::Values(...));
#ifndef DEVICE_OPS_TESTING_OPERATOR_CHECKS_H_
#define DEVICE_OPS_TESTING_OPERATOR_CHECKS_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <ostream>

#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {

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

class OperatorsTest : public ::testing::TestWithParam<TestedDevice> {
 protected:
  void SetUp() override { GetParam().prepare(); }
};

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_OPERATOR_CHECKS_H_
