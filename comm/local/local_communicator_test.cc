#include "comm/local/local_communicator.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::StatusIs;

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "local",
                             [](int world_size, absl::Duration timeout) {
                               return CreateLocalGroup(world_size, {timeout});
                             }}),
                         BackendName);

TEST(LocalCommunicatorTest, RefusesAGroupOfNobody) {
  EXPECT_THAT(CreateLocalGroup(0), StatusIs(absl::StatusCode::kInvalidArgument,
                                            ::testing::HasSubstr("0 ranks")));
}

}  // namespace
}  // namespace fsdp::comm::testing
