// The tests that all Registers pass.
#ifndef REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_
#define REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_

#include <array>
#include <functional>
#include <memory>

#include "gtest/gtest.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

// Makes registers without values. Returns two processes' views of them, which
// keep what has to live with them.
using MakeRegisters =
    std::function<std::array<std::shared_ptr<Registers>, 2>()>;

// A test links :registers_contract and names one for each way of making it:
//   INSTANTIATE_TEST_SUITE_P(Memory, RegistersContract,
//                            ::testing::Values(...));
class RegistersContract : public ::testing::TestWithParam<MakeRegisters> {
 private:
  const std::array<std::shared_ptr<Registers>, 2> views_ = GetParam()();

 protected:
  const std::shared_ptr<Registers> registers_ = views_[0];
  const std::shared_ptr<Registers> others_ = views_[1];
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_REGISTERS_CONTRACT_H_
