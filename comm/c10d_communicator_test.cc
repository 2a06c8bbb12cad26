#include "comm/c10d_communicator.h"

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

GlooOptions OptionsFor(absl::Duration timeout) {
  GlooOptions options;
  options.timeout = timeout;
  options.hostname = "127.0.0.1";
  return options;
}

// Ranks are threads here: everything but the processes is real.
absl::StatusOr<Group> CreateGlooGroup(int world_size, absl::Duration timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> results(
      world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] =
          CreateGlooCommunicator(store, rank, world_size, OptionsFor(timeout));
    });
  }
  for (std::thread& thread : threads) thread.join();
  Group group;
  for (auto& result : results) {
    FSDP_ASSIGN_OR_RETURN(auto communicator, std::move(result));
    group.push_back(std::move(communicator));
  }
  return group;
}

INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorContract,
                         ::testing::Values(ContractBackend{"gloo",
                                                           CreateGlooGroup}),
                         BackendName);

TEST(GlooCommunicatorTest, NamesTheRanksThatDoNotCome) {
  EXPECT_THAT(
      CreateGlooCommunicator(c10::make_intrusive<c10d::HashStore>(), 1, 3,
                             OptionsFor(absl::Milliseconds(50))),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("create the gloo group on rank 1 of 3"),
                     HasSubstr("rank 0, rank 2 did not come within 50ms"))));
}

TEST(GlooCommunicatorTest, RefusesWrongOptions) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank : {-1, 2}) {
    EXPECT_THAT(CreateGlooCommunicator(store, rank, 2),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("rank < world size")));
  }
  GlooOptions both = OptionsFor(absl::Seconds(1));
  both.interface = "lo";
  EXPECT_THAT(CreateGlooCommunicator(store, 0, 1, both),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("both")));
  GlooOptions nowhere;
  nowhere.interface = "no_such_interface";
  EXPECT_THAT(CreateGlooCommunicator(store, 0, 1, nowhere).status().message(),
              HasSubstr("no_such_interface"));
}

TEST(GlooCommunicatorTest, RefusesRanksThatDisagreeOnTheSize) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  absl::Status first;
  std::thread other([&] {
    first = CreateGlooCommunicator(store, 0, 1, OptionsFor(absl::Seconds(20)))
                .status();
  });
  EXPECT_THAT(
      CreateGlooCommunicator(store, 1, 2, OptionsFor(absl::Seconds(20))),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("2 here, rank 0 says 1")));
  other.join();
  EXPECT_OK(first);
}

}  // namespace
}  // namespace fsdp::comm::testing
