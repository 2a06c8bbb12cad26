// What the kernels of a device are held against: the CPU's, bit by bit. A test
// links operator_checks and says for which devices:
//
//   INSTANTIATE_TEST_SUITE_P(Name, OperatorsTest, ::testing::Values(...));
#ifndef DEVICE_OPS_CUDA_OPERATOR_CHECKS_H_
#define DEVICE_OPS_CUDA_OPERATOR_CHECKS_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <ostream>

#include "gtest/gtest.h"

namespace fsdp::device_ops::cuda {

struct TestedDevice {
  const char* name;
  c10::Device device;
  std::function<void()> prepare;  // before each test
  int64_t max_numel;              // of what is packed
  int64_t max_blocks;             // that are quantised
};

inline std::ostream& operator<<(std::ostream& out, const TestedDevice& tested) {
  return out << tested.name;
}

class OperatorsTest : public ::testing::TestWithParam<TestedDevice> {
 protected:
  void SetUp() override { GetParam().prepare(); }
};

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_OPERATOR_CHECKS_H_
