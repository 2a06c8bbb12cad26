// The tests that all Registers pass.
#ifndef REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_
#define REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_

#include <functional>
#include <memory>

#include "gtest/gtest.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

// A test links :registers_contract and names one for each way of making it:
//   INSTANTIATE_TEST_SUITE_P(Memory, RegistersContract,
//                            ::testing::Values(...));
struct RegistersUnderTest {
  // Makes registers without values, and keeps what has to live with them.
  std::function<std::shared_ptr<Registers>()> make;
  // Makes another process's view of them; null: all threads use those of
  // `make`.
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
