// The tests that all Registers pass.
#ifndef REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_
#define REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_

#include <functional>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

// Its test links :registers_contract and names one per way of making it:
//   INSTANTIATE_TEST_SUITE_P(Memory, RegistersContract,
//   ::testing::Values(...));
struct RegistersUnderTest {
  // Without values. What has to live as long as they do comes along.
  std::function<std::shared_ptr<Registers>()> make;
  // Another process's view of the same; null: `make`'s are used by all threads.
  std::function<std::shared_ptr<Registers>(const std::shared_ptr<Registers>&)>
      connect_another;
};

class RegistersContract : public ::testing::TestWithParam<RegistersUnderTest> {
 protected:
  void SetUp() override;

  std::shared_ptr<Registers> registers_;
  std::shared_ptr<Registers> others_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_
