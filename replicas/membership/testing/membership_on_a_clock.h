// A test holds the clock and the registers of these memberships.
#ifndef REPLICAS_MEMBERSHIP_TESTING_MEMBERSHIP_ON_A_CLOCK_H_
#define REPLICAS_MEMBERSHIP_TESTING_MEMBERSHIP_ON_A_CLOCK_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/memory_registers.h"

namespace fsdp::replicas::testing {

// Waits pass at once; other calls can fail.
class SteeredRegisters final : public ForwardingRegisters {
 public:
  SteeredRegisters(Registers* base, absl::Time* now)
      : ForwardingRegisters(base), now_(now) {}
  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    if (is_away) return absl::UnavailableError("away");
    ++gets;
    return ForwardingRegisters::Get(key);
  }
  absl::Status Set(const std::string& key, const std::string& value) override {
    if (is_away || sets_fail) return absl::UnavailableError("away");
    if (absl::StartsWith(key, "membership/notice/")) ++notices;
    return ForwardingRegisters::Set(key, value);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override {
    ++adds;
    return ForwardingRegisters::Add(key, addend);
  }
  absl::Status Await(const std::string& key, absl::Time deadline) override {
    ++waits;
    if (meanwhile) meanwhile();
    const absl::StatusOr<bool> there = HasAll({key});
    if (*there && !is_away) return absl::OkStatus();
    *now_ = std::max(*now_, deadline);
    if (is_away) return absl::UnavailableError("away");
    return absl::DeadlineExceededError("waited");
  }

  bool is_away = false;
  bool sets_fail = false;
  int gets = 0;
  int adds = 0;
  int notices = 0;  // that were written
  int waits = 0;
  std::function<void()> meanwhile;

 private:
  absl::Time* const now_;
};

class MembershipOnAClock : public ::testing::Test {
 protected:
  MembershipOnAClock() {
    options_.replicas = 2;
    options_.found_timeout = absl::Seconds(20);
    options_.loss_timeout = absl::Seconds(10);
    options_.now = [this] { return now_; };
  }

  std::unique_ptr<Membership> Of(int replica, int incarnation = 0,
                                 int rank = 0) {
    MembershipOptions options = options_;
    options.self = {replica, incarnation};
    options.rank = rank;
    auto membership = Membership::Create(options, &registers_);
    EXPECT_OK(membership);
    return *std::move(membership);
  }

  // Returns the newest entry after `membership` has polled for `seconds`.
  std::string Poll(Membership& membership, double seconds = 0) {
    const absl::Time end = now_ + absl::Seconds(seconds);
    while (true) {
      const absl::StatusOr<Roster> roster = membership.Poll();
      EXPECT_OK(roster);
      if (now_ >= end) return Encode(*roster);
      now_ += absl::Seconds(1);
    }
  }

  // Returns replicas 0 to `count` - 1, founded with step 5.
  std::vector<std::unique_ptr<Membership>> Founded(int count) {
    options_.replicas = count;
    std::vector<std::unique_ptr<Membership>> members;
    for (int replica = 0; replica < count; ++replica) {
      members.push_back(Of(replica));
      EXPECT_OK(members.back()->Request(5));
    }
    Poll(*members[0]);
    for (auto& member : members) Poll(*member);
    EXPECT_EQ(members[0]->latest().members.size(), count);
    return members;
  }

  void AllVote(std::vector<std::unique_ptr<Membership>>& members) {
    const Roster roster = *members[0]->Poll();
    for (auto& member : members) EXPECT_OK(member->VoteFor(roster));
  }

  absl::Time now_ = absl::UnixEpoch();
  MembershipOptions options_;
  MemoryRegisters memory_;
  SteeredRegisters registers_{&memory_, &now_};
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_MEMBERSHIP_ON_A_CLOCK_H_
