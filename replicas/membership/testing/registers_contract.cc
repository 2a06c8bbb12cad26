#include "replicas/membership/testing/registers_contract.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"

namespace fsdp::replicas::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::Optional;

constexpr absl::Duration kSoon = absl::Milliseconds(30);
constexpr absl::Duration kNever = absl::Seconds(60);

}  // namespace

TEST_P(RegistersContract, OthersSeeWhatWasSetLast) {
  EXPECT_OK(registers_->Set("key", "first"));
  EXPECT_OK(registers_->Set("key", "second"));
  EXPECT_OK(registers_->Set("key/2", "another"));
  ASSERT_OK_AND_ASSIGN(const auto value, others_->Get("key"));
  EXPECT_THAT(value, Optional(std::string("second")));
}

TEST_P(RegistersContract, ValuesAreAnyBytes) {
  for (const std::string& value :
       {std::string("\0\xff\n \"", 5), std::string(64 << 10, 'x')}) {
    EXPECT_OK(registers_->Set("key", value));
    ASSERT_OK_AND_ASSIGN(const auto got, others_->Get("key"));
    EXPECT_THAT(got, Optional(value));
  }
}

TEST_P(RegistersContract, WhatWasRemovedIsNotThereAndCanBeRemovedAgain) {
  EXPECT_OK(registers_->Set("key", "value"));
  EXPECT_OK(others_->Remove("key"));
  ASSERT_OK_AND_ASSIGN(const auto value, registers_->Get("key"));
  EXPECT_EQ(value, std::nullopt);
  EXPECT_OK(registers_->Remove("key"));
}

TEST_P(RegistersContract, CompareAndSetOfAnAbsentKeyHappensOnce) {
  EXPECT_THAT(*registers_->CompareAndSet("key", "", "first"), "first");
  EXPECT_THAT(*others_->CompareAndSet("key", "", "second"), "first");
  ASSERT_OK_AND_ASSIGN(const auto value, registers_->Get("key"));
  EXPECT_THAT(value, Optional(std::string("first")));
}

TEST_P(RegistersContract, CompareAndSetWantsWhatIsThere) {
  EXPECT_OK(registers_->Set("key", "1"));
  EXPECT_THAT(*registers_->CompareAndSet("key", "0", "2"), "1");
  EXPECT_THAT(*registers_->CompareAndSet("key", "1", "2"), "2");
  EXPECT_THAT(*others_->CompareAndSet("key", "1", "3"), "2");
  ASSERT_OK_AND_ASSIGN(const auto value, others_->Get("key"));
  EXPECT_THAT(value, Optional(std::string("2")));
}

TEST_P(RegistersContract, CompareAndSetOfWhatIsGoneDoesNothing) {
  // The contract allows "" or `expected`, but never `value`.
  EXPECT_NE(*registers_->CompareAndSet("key", "1", "2"), "2");
  ASSERT_OK_AND_ASSIGN(const auto value, registers_->Get("key"));
  EXPECT_EQ(value, std::nullopt);
}

TEST_P(RegistersContract, SumsAreDecimalNumbers) {
  EXPECT_THAT(*registers_->Add("sum", 1), 1);
  EXPECT_THAT(*others_->Add("sum", 41), 42);
  EXPECT_THAT(*registers_->Add("sum", -50), -8);
  ASSERT_OK_AND_ASSIGN(const auto value, registers_->Get("sum"));
  EXPECT_THAT(value, Optional(std::string("-8")));
  EXPECT_OK(registers_->Set("sum", "text"));
  EXPECT_THAT(others_->Add("sum", 1).ok(), false);
}

TEST_P(RegistersContract, HasAllWantsEachOfThem) {
  EXPECT_OK(registers_->Set("a", ""));
  EXPECT_OK(registers_->Set("b", "1"));
  EXPECT_THAT(*others_->HasAll({"a"}), true);
  EXPECT_THAT(*others_->HasAll({"b", "a"}), true);
  EXPECT_THAT(*others_->HasAll({"a", "c", "b"}), false);
  EXPECT_OK(registers_->Remove("a"));
  EXPECT_THAT(*others_->HasAll({"a", "b"}), false);
  std::vector<std::string> many;
  for (int i = 0; i < 1000; ++i) {
    many.push_back(absl::StrCat("key/", i));
    EXPECT_OK(registers_->Set(many.back(), "1"));
  }
  EXPECT_THAT(*others_->HasAll(many), true);
  many.push_back("missing");
  EXPECT_THAT(*others_->HasAll(many), false);
}

TEST_P(RegistersContract, AwaitEndsAtItsDeadlineAndNotBefore) {
  const absl::Time deadline = absl::Now() + kSoon;
  EXPECT_THAT(registers_->Await("key", deadline),
              StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  EXPECT_GE(absl::Now(), deadline);
  EXPECT_THAT(registers_->Await("key", absl::Now() - kSoon),
              StatusIs(absl::StatusCode::kDeadlineExceeded, _));
}

TEST_P(RegistersContract, WhoWaitsHoldsNobodyUp) {
  std::thread waits(
      [&] { EXPECT_OK(registers_->Await("key", absl::Now() + kNever)); });
  // The same object makes these calls one after the other: each has to come
  // through for the wait to end.
  EXPECT_THAT(*registers_->Add("sum", 1), 1);
  EXPECT_THAT(*registers_->CompareAndSet("cas", "", "1"), "1");
  EXPECT_OK(others_->Set("key", "1"));
  waits.join();
}

TEST_P(RegistersContract, ThreadsAddAndExchangeOneAfterTheOther) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::vector<int64_t> sums[kThreads];
  int exchanged[kThreads] = {};
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      Registers& registers = thread % 2 == 0 ? *registers_ : *others_;
      for (int round = 0; round < kRounds; ++round) {
        sums[thread].push_back(*registers.Add("sum", 1));
        const std::string mine = absl::StrCat(thread, " in ", round);
        exchanged[thread] +=
            *registers.CompareAndSet(absl::StrCat("round ", round), "", mine) ==
            mine;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> all;
  std::vector<int64_t> expected;
  expected.reserve(size_t{kThreads} * kRounds);
  int winners = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    all.insert(all.end(), sums[thread].begin(), sums[thread].end());
    winners += exchanged[thread];
  }
  std::sort(all.begin(), all.end());
  for (int i = 1; i <= kThreads * kRounds; ++i) expected.push_back(i);
  EXPECT_THAT(all, ::testing::ElementsAreArray(expected));
  EXPECT_EQ(winners, kRounds);
}

}  // namespace fsdp::replicas::testing
