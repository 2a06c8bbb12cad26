#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/memory_registers.h"

namespace fsdp::replicas {
namespace {

constexpr int kReplicas = 3;
constexpr int64_t kSteps = 40;

// Is one rank that computes in one thread and watches in another.
void Train(Membership& membership, std::vector<Roster>& seen) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  ASSERT_OK(membership.Request(0));
  ASSERT_OK_AND_ASSIGN(Roster roster, membership.AwaitMembership(deadline));
  std::atomic<bool> is_done{false};
  std::thread watches([&] {
    while (!is_done) {
      EXPECT_OK(membership.Poll());
      EXPECT_GE(membership.latest().number, 0);
    }
  });
  while (!membership.HasEnded(roster)) {
    seen.push_back(roster);
    EXPECT_OK(membership.VoteFor(roster));
    absl::StatusOr<Roster> next = membership.AwaitNext(roster, deadline);
    EXPECT_OK(next);
    if (!next.ok()) break;
    roster = *next;
  }
  is_done = true;
  watches.join();
}

TEST(MembershipThreadsTest, StepsAndWatchersAtOnce) {
  testing::MemoryRegisters registers;
  std::vector<std::unique_ptr<Membership>> members;
  std::vector<std::vector<Roster>> seen(kReplicas);
  std::vector<std::thread> threads;
  threads.reserve(kReplicas);
  for (int replica = 0; replica < kReplicas; ++replica) {
    MembershipOptions options;
    options.self.replica = replica;
    options.replicas = kReplicas;
    options.steps = kSteps;
    options.log_entries = 4;
    ASSERT_OK_AND_ASSIGN(auto membership,
                         Membership::Create(options, &registers));
    members.push_back(std::move(membership));
  }
  for (int replica = 0; replica < kReplicas; ++replica) {
    threads.emplace_back(
        [&, replica] { Train(*members[replica], seen[replica]); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen[0].size(), static_cast<size_t>(kSteps));
  for (int replica = 1; replica < kReplicas; ++replica) {
    EXPECT_EQ(seen[replica], seen[0]) << replica;
  }
}

}  // namespace
}  // namespace fsdp::replicas
