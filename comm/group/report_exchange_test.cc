#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/group/failure_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(60);

// One that answers nothing after Hold(), as if its host were cut off, until
// the test has ended.
class HeldStore final : public c10d::HashStore {
 public:
  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  void LetGo() { let_go_.Notify(); }
  // Whether a call has waited in vain for LetGo(), which comes when all others
  // have returned.
  bool somebody_waited() {
    absl::MutexLock lock(&mutex_);
    return somebody_waited_;
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    Pass();
    HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    Pass();
    return HashStore::check(keys);
  }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<HeldStore>::unsafe_reclaim_from_nonowning(this);
  }

 private:
  void Pass() {
    {
      absl::MutexLock lock(&mutex_);
      if (!held_) return;
    }
    const bool in_time = let_go_.WaitForNotificationWithTimeout(kLimit);
    absl::MutexLock lock(&mutex_);
    somebody_waited_ = somebody_waited_ || !in_time;
  }

  absl::Mutex mutex_;
  bool held_ = false;
  bool somebody_waited_ = false;
  absl::Notification let_go_;
};

std::vector<std::unique_ptr<ReportExchange>> MakeExchanges(
    const c10::intrusive_ptr<c10d::Store>& store, int ranks) {
  std::vector<std::unique_ptr<ReportExchange>> exchanges;
  for (int rank = 0; rank < ranks; ++rank) {
    auto exchange = ReportExchange::Create(store, rank, ranks);
    EXPECT_OK(exchange);
    exchanges.push_back(*std::move(exchange));
    EXPECT_OK(exchanges.back()->Start([] {}));
  }
  return exchanges;
}

RankReport Left() {
  RankReport report;
  report.cause = Cause::kLeft;
  return report;
}

RankReport Failed() {
  RankReport report;
  report.cause = Cause::kDeadline;
  report.text = "too late";
  return report;
}

TEST(ReportExchangeTest, WhoHasFailedHearsWhoHasLeft) {
  const auto exchanges = MakeExchanges(c10::make_intrusive<c10d::HashStore>(),
                                       /*ranks=*/3);
  exchanges[1]->Leave(Left());
  exchanges[0]->Report(Failed(), absl::Milliseconds(50));
  const ReportExchange::Findings findings =
      exchanges[0]->Await(absl::Now() + kLimit);
  EXPECT_TRUE(findings.store_answers);
  ASSERT_TRUE(findings.reports[1].has_value());
  EXPECT_EQ(findings.reports[1]->cause, Cause::kLeft);
  EXPECT_FALSE(findings.reports[2].has_value());
}

TEST(ReportExchangeTest, AFailureAlarmsTheOthers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  absl::Notification alarmed;
  auto watching = ReportExchange::Create(store, 0, 2);
  auto failing = ReportExchange::Create(store, 1, 2);
  ASSERT_OK(watching);
  ASSERT_OK(failing);
  ASSERT_OK((*watching)->Start([&] { alarmed.Notify(); }));
  (*failing)->Report(Failed(), absl::Milliseconds(1));
  EXPECT_TRUE(alarmed.WaitForNotificationWithTimeout(kLimit));
}

// Nobody who leaves waits for a store that does not answer any more.
TEST(ReportExchangeTest, WhoLeavesASilentStoreIsNotHeldByIt) {
  const auto store = c10::make_intrusive<HeldStore>();
  auto exchanges = MakeExchanges(store, /*ranks=*/1);
  store->Hold();
  exchanges[0]->Leave(Left());
  exchanges.clear();
  EXPECT_FALSE(store->somebody_waited());
  store->LetGo();
}

TEST(ReportExchangeTest, WhoFailsBesideASilentStoreIsNotHeldByIt) {
  const auto store = c10::make_intrusive<HeldStore>();
  auto exchanges = MakeExchanges(store, /*ranks=*/2);
  store->Hold();
  exchanges[0]->Report(Failed(), absl::Milliseconds(1));
  EXPECT_FALSE(
      exchanges[0]->Await(absl::Now() + absl::Milliseconds(1)).store_answers);
  exchanges[0].reset();
  EXPECT_FALSE(store->somebody_waited());
  store->LetGo();
}

// The store has answered so far: all is told, only the own watcher is not.
TEST(ReportExchangeTest, AStoreThatFallsSilentAfterTheReportHoldsNobody) {
  const auto store = c10::make_intrusive<HeldStore>();
  auto exchanges = MakeExchanges(store, /*ranks=*/1);
  exchanges[0]->Report(Failed(), absl::Milliseconds(1));
  EXPECT_TRUE(exchanges[0]->Await(absl::Now() + kLimit).store_answers);
  store->Hold();
  exchanges.clear();
  EXPECT_FALSE(store->somebody_waited());
  store->LetGo();
}

}  // namespace
}  // namespace fsdp::comm
