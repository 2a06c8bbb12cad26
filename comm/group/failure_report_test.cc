#include "comm/group/failure_report.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Reports = std::vector<std::optional<RankReport>>;
using Code = absl::StatusCode;

const RankReport kLostHere = {Cause::kLost, "lost rank 2", "is in #4"};
const RankReport kEchoThere = {Cause::kEcho, "told", "has finished #3"};
const RankReport kLeaves = {Cause::kLeft, "", ""};
const RankReport kFails = {Cause::kDeadline, "too late", ""};

TEST(FailureReportTest, EncodingIsUndone) {
  const RankReport report = {Cause::kLeft, "two\nlines", "is in #1 of a"};
  const auto decoded = Decode(Encode(report));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->cause, report.cause);
  EXPECT_EQ(decoded->text, report.text);
  EXPECT_EQ(decoded->position, report.position);
  const std::string text = Encode(report);
  for (size_t size = 0; size < text.size(); ++size) {
    const auto part = Decode(text.substr(0, size));
    EXPECT_TRUE(!part || part->cause == report.cause) << size;
  }
}

TEST(FailureReportTest, OtherTextsAreNoReports) {
  for (absl::string_view text : {"", "3", "1\na", "\na\nb", "x\na\nb",
                                 "-1\na\nb", "6\na\nb", "99\na\nb"}) {
    EXPECT_FALSE(Decode(text).has_value()) << text;
  }
}

TEST(FailureReportTest, LongTextsAreCut) {
  RankReport report;
  report.text = std::string(100'000, 'x');
  EXPECT_LT(Encode(report).size(), 4096u);
}

TEST(FailureReportTest, AnAbortExplainsEverything) {
  const Reports reports = {kLostHere,
                           RankReport{Cause::kAbort, "disk full", "is in #4"},
                           std::nullopt};
  EXPECT_TRUE(Explains(reports));
  EXPECT_THAT(Verdict(0, RankNames(3), reports, true),
              StatusIs(Code::kAborted, "rank 1 aborted: disk full"));
}

TEST(FailureReportTest, AMismatchExplainsLostConnections) {
  const Reports reports = {
      kLostHere, RankReport{Cause::kMismatch, "calls differ", "is in #4"}};
  EXPECT_TRUE(Explains(reports));
  EXPECT_THAT(Verdict(0, RankNames(2), reports, true),
              StatusIs(Code::kInvalidArgument, "calls differ"));
}

TEST(FailureReportTest, TheRankThatWaitedTellsWhereTheOthersAre) {
  const Reports reports = {RankReport{Cause::kDeadline, "too late", "is in #4"},
                           kEchoThere, std::nullopt};
  EXPECT_FALSE(Explains(reports));
  const auto elsewhere =
      AllOf(HasSubstr("too late; rank"),
            HasSubstr("rank 2 does not answer: dead, stopped or cut off"));
  EXPECT_THAT(Verdict(0, RankNames(3), reports, true),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(elsewhere, HasSubstr("rank 1 has finished #3"))));
  EXPECT_THAT(
      Verdict(1, RankNames(3), reports, true),
      StatusIs(Code::kAborted,
               AllOf(elsewhere, ::testing::StartsWith(
                                    "rank 0, which is in #4, gave up: "))));
}

TEST(FailureReportTest, ALostConnectionNamesWhoIsSilentAndWhoHasLeft) {
  const Reports silent = {kLostHere, kEchoThere, std::nullopt, std::nullopt};
  EXPECT_THAT(Verdict(0, RankNames(4), silent, true),
              StatusIs(Code::kUnavailable,
                       "lost rank 2; rank 1 has finished #3; rank 2, rank 3 do "
                       "not answer: dead, stopped or cut off"));
  const Reports left = {kLostHere,
                        RankReport{Cause::kLeft, "", "has finished #3"}};
  EXPECT_TRUE(Explains(left));
  EXPECT_THAT(Verdict(0, RankNames(2), left, true),
              StatusIs(Code::kUnavailable,
                       "lost rank 2; rank 1 has left the group: it has "
                       "finished #3"));
}

TEST(FailureReportTest, WithoutTheStoreNobodyIsAccused) {
  EXPECT_THAT(Verdict(0, RankNames(2), Reports{kLostHere, std::nullopt}, false),
              StatusIs(Code::kUnavailable,
                       AllOf(HasSubstr("nothing is known of rank 1"),
                             HasSubstr("the store does not answer"),
                             HasSubstr("often rank 0, "))));
  EXPECT_THAT(
      Verdict(0, RankNames(8).Part({3, 5}), Reports{kLostHere, std::nullopt},
              false),
      StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 1 (world rank 5), "),
                                         HasSubstr("often world rank 0, "))));
}

constexpr absl::Duration kLimit = absl::Seconds(60);

// A store that answers nothing after Hold() until the test has ended, as if its
// host were cut off. Its first wait ends early.
class HeldStore final : public c10d::HashStore {
 public:
  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  void LetGo() { let_go_.Notify(); }
  // Returns whether a call has waited in vain for LetGo(), which comes when all
  // others have returned.
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
  using HashStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& limit) override {
    TORCH_CHECK_WITH(DistStoreError, has_waited_.exchange(true), "in vain");
    HashStore::wait(keys, limit);
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
  std::atomic<bool> has_waited_ = false;
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

TEST(ReportExchangeTest, WhoHasFailedHearsWhoHasLeft) {
  const auto exchanges = MakeExchanges(c10::make_intrusive<c10d::HashStore>(),
                                       /*ranks=*/3);
  exchanges[1]->Leave(kLeaves);
  exchanges[0]->Report(kFails, absl::Milliseconds(50));
  const ReportExchange::Findings findings =
      exchanges[0]->Await(absl::Now() + kLimit);
  EXPECT_TRUE(findings.store_answers);
  ASSERT_TRUE(findings.reports[1].has_value());
  EXPECT_EQ(findings.reports[1]->cause, Cause::kLeft);
  EXPECT_FALSE(findings.reports[2].has_value());
}

TEST(ReportExchangeTest, AFailureAlarmsTheOthersHoweverLongTheyHaveWaited) {
  const auto store = c10::make_intrusive<HeldStore>();
  absl::Notification alarmed;
  auto watching = ReportExchange::Create(store, 0, 2);
  auto failing = ReportExchange::Create(store, 1, 2);
  ASSERT_OK(watching);
  ASSERT_OK(failing);
  ASSERT_OK((*watching)->Start([&] { alarmed.Notify(); }));
  (*failing)->Report(kFails, absl::Milliseconds(1));
  EXPECT_TRUE(alarmed.WaitForNotificationWithTimeout(kLimit));
}

// Nobody waits for a store that does not answer any more: who leaves, who
// fails, and who has told all, so that only its watcher still waits.
TEST(ReportExchangeTest, ASilentStoreHoldsNobody) {
  const auto leave = [](HeldStore& store, ReportExchange& exchange) {
    store.Hold();
    exchange.Leave(kLeaves);
  };
  const auto fail = [](HeldStore& store, ReportExchange& exchange) {
    store.Hold();
    exchange.Report(kFails, absl::Milliseconds(1));
    EXPECT_FALSE(
        exchange.Await(absl::Now() + absl::Milliseconds(1)).store_answers);
  };
  const auto tell = [](HeldStore& store, ReportExchange& exchange) {
    exchange.Report(kFails, absl::Milliseconds(1));
    EXPECT_TRUE(exchange.Await(absl::Now() + kLimit).store_answers);
    store.Hold();
  };
  for (void (*act)(HeldStore&, ReportExchange&) : {+leave, +fail, +tell}) {
    const auto store = c10::make_intrusive<HeldStore>();
    auto exchanges = MakeExchanges(store, /*ranks=*/2);
    act(*store, *exchanges[0]);
    exchanges[0].reset();
    EXPECT_FALSE(store->somebody_waited());
    store->LetGo();
  }
}

TEST(C10dStatusTest, ConnectionErrorsKeepTheirFirstLineWithoutThePlace) {
  const struct {
    std::string text;
    std::string shortened;
  } cases[] = {
      {"", ""},
      {"connection closed", "connection closed"},
      {"sum: [/src/gloo/pair.cc:547] Connection closed by peer",
       "sum: Connection closed by peer"},
      {"[/src/pair.cc:5] reset\nException raised from (frame 0)\n", "reset"},
      // These are no places: a range, and one that does not end.
      {"rank [1] of 2", "rank [1] of 2"},
      {"[/src/pair.cc:5 reset", "[/src/pair.cc:5 reset"},
      {"closed\n[/src/pair.cc:5] frame", "closed"},
      {"[1] [/src/pair.cc:5] reset", "[1] reset"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(ConnectionError(absl::UnknownError(c.text)),
              absl::UnavailableError(c.shortened))
        << c.text;
  }
}

TEST(C10dStatusTest, WhatCallsReturnAndThrow) {
  EXPECT_OK(C10dToStatus("sum", [] {}));
  EXPECT_THAT(C10dToStatus("sum",
                           [] {
                             throw std::runtime_error(
                                 "[/src/pair.cc:5] Connection reset");
                           }),
              StatusIs(Code::kUnavailable, "sum: Connection reset"));
  EXPECT_THAT(C10dToStatus("sum",
                           [] {
                             TORCH_CHECK(false, "Backend mpi does not support ",
                                         "alltoall");
                           }),
              StatusIs(Code::kUnimplemented,
                       "sum: Backend mpi does not support alltoall"));
  EXPECT_THAT(C10dToStatus("sum", [] { TORCH_CHECK(false, "a bug\nframe"); }),
              StatusIs(Code::kInternal, "sum: a bug"));
  // Our own error for an argument does not say that a backend lacks something.
  EXPECT_THAT(
      C10dToStatus("sum",
                   [] { TORCH_CHECK_VALUE(false, "does not support this"); }),
      StatusIs(Code::kInvalidArgument, "sum: does not support this"));
}

}  // namespace
}  // namespace fsdp::comm
