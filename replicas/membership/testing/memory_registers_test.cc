#include "replicas/membership/testing/memory_registers.h"

#include <memory>

#include "gtest/gtest.h"
#include "replicas/membership/testing/registers_contract.h"

namespace fsdp::replicas::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Memory, RegistersContract,
                         ::testing::Values(RegistersUnderTest{
                             [] { return std::make_shared<MemoryRegisters>(); },
                             nullptr}));

}  // namespace
}  // namespace fsdp::replicas::testing
