// Holds the checker against the C++ standard: small programs with known
// outcomes ([intro.races], [atomics.order], and the papers that name them). All
// of these have to be seen, and no others.
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "comm/host/shared_segment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/checker.h"

namespace fsdp::interleavings {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr auto kSeqCst = std::memory_order_seq_cst;

// Variables that threads share, zero at first, and what each has read.
struct Shared {
  std::atomic<int> x;
  std::atomic<int> y;
  std::atomic<int> z;
  int plain;
};
struct Seen {
  int a = 0;
  int b = 0;
};
using Body = std::function<void(Shared&, Seen&)>;

class Litmus final : public Scenario {
 public:
  Litmus(const std::vector<Body>* bodies, std::set<std::string>* outcomes)
      : bodies_(*bodies), outcomes_(outcomes), seen_(bodies->size()) {}

  void SetUp(Machine& machine) override {
    machine.set_rank(0);
    segment_ = comm::SharedSegment::Create(sizeof(Shared)).value();
    shared_ = reinterpret_cast<Shared*>(segment_->data());
    for (size_t i = 0; i < bodies_.size(); ++i) {
      machine.AddThread(0, [this, i] { bodies_[i](*shared_, seen_[i]); });
    }
  }
  void Check(Machine&) override {
    std::string outcome;
    for (const Seen& seen : seen_) {
      absl::StrAppend(&outcome, seen.a, seen.b, " ");
    }
    outcomes_->insert(outcome);
  }

 private:
  const std::vector<Body>& bodies_;
  std::set<std::string>* const outcomes_;
  std::unique_ptr<comm::SharedSegment> segment_;
  Shared* shared_ = nullptr;
  std::vector<Seen> seen_;
};

struct Outcomes {
  std::set<std::string> values;  // "ab" of each thread
  CheckResult result;
};
Outcomes OutcomesOf(const std::vector<Body>& bodies,
                    const CheckOptions& options = {}) {
  Outcomes outcomes;
  outcomes.result = Explore(
      [&] { return std::make_unique<Litmus>(&bodies, &outcomes.values); },
      options);
  return outcomes;
}

std::vector<Body> MessagePassing(std::memory_order store,
                                 std::memory_order load) {
  return {[store](Shared& s, Seen&) {
            s.x.store(1, kRelaxed);
            s.y.store(1, store);
          },
          [load](Shared& s, Seen& seen) {
            seen.a = s.y.load(load);
            seen.b = s.x.load(kRelaxed);
          }};
}

TEST(LitmusTest, MessagePassing) {
  EXPECT_THAT(OutcomesOf(MessagePassing(kRelease, kAcquire)).values,
              ElementsAre("00 00 ", "00 01 ", "00 11 "));
  for (auto [store, load] :
       {std::pair(kRelaxed, kAcquire), std::pair(kRelease, kRelaxed)}) {
    EXPECT_THAT(OutcomesOf(MessagePassing(store, load)).values,
                ElementsAre("00 00 ", "00 01 ", "00 10 ", "00 11 "));
  }
}

std::vector<Body> StoreBuffering(std::memory_order store,
                                 std::memory_order load) {
  return {[=](Shared& s, Seen& seen) {
            s.x.store(1, store);
            seen.a = s.y.load(load);
          },
          [=](Shared& s, Seen& seen) {
            s.y.store(1, store);
            seen.a = s.x.load(load);
          }};
}

TEST(LitmusTest, StoreBuffering) {
  EXPECT_THAT(OutcomesOf(StoreBuffering(kSeqCst, kSeqCst)).values,
              ElementsAre("00 10 ", "10 00 ", "10 10 "));
  for (auto [store, load] :
       {std::pair(kRelease, kAcquire), std::pair(kSeqCst, kAcquire),
        std::pair(kRelease, kSeqCst)}) {
    EXPECT_THAT(OutcomesOf(StoreBuffering(store, load)).values,
                ElementsAre("00 00 ", "00 10 ", "10 00 ", "10 10 "));
  }
}

TEST(LitmusTest, OneLocationIsCoherent) {
  const std::vector<Body> bodies = {
      [](Shared& s, Seen&) { s.x.store(1, kRelaxed); },
      [](Shared& s, Seen&) { s.x.store(2, kRelaxed); },
      [](Shared& s, Seen& seen) {
        seen.a = s.x.load(kRelaxed);
        seen.b = s.x.load(kRelaxed);
      }};
  std::set<std::string> expected;
  for (int a : {0, 1, 2}) {
    for (int b : {0, 1, 2}) {
      if (b == 0 && a != 0) continue;  // nobody goes back to the beginning
      expected.insert(absl::StrCat("00 00 ", a, b, " "));
    }
  }
  EXPECT_EQ(OutcomesOf(bodies).values, expected);
}

// Two readers of independent writes may disagree about their order.
TEST(LitmusTest, ReadersDisagreeOnlyWithoutSequentialConsistency) {
  const std::string disagree = "00 00 10 10 ";
  for (auto [load, may_disagree] :
       {std::pair(kAcquire, true), std::pair(kSeqCst, false)}) {
    const auto order = load;
    const std::vector<Body> bodies = {
        [](Shared& s, Seen&) { s.x.store(1, kSeqCst); },
        [](Shared& s, Seen&) { s.y.store(1, kSeqCst); },
        [order](Shared& s, Seen& seen) {
          seen.a = s.x.load(order);
          seen.b = s.y.load(order);
        },
        [order](Shared& s, Seen& seen) {
          seen.a = s.y.load(order);
          seen.b = s.x.load(order);
        }};
    const Outcomes outcomes = OutcomesOf(bodies);
    EXPECT_EQ(outcomes.values.count(disagree) > 0, may_disagree);
    EXPECT_EQ(outcomes.values.size(), may_disagree ? 16u : 15u)
        << ::testing::PrintToString(outcomes.values) << outcomes.result;
  }
}

// The third thread learns of the first by way of the second.
TEST(LitmusTest, CausalityPassesOn) {
  for (auto [store, expected] :
       {std::pair(kRelease, false), std::pair(kRelaxed, true)}) {
    const auto order = store;
    const Outcomes outcomes =
        OutcomesOf({[](Shared& s, Seen&) { s.x.store(1, kRelease); },
                    [order](Shared& s, Seen& seen) {
                      seen.a = s.x.load(kAcquire);
                      s.y.store(1, order);
                    },
                    [](Shared& s, Seen& seen) {
                      seen.a = s.y.load(kAcquire);
                      seen.b = s.x.load(kRelaxed);
                    }});
    EXPECT_EQ(outcomes.values.count("00 10 10 ") > 0, expected);
  }
}

TEST(LitmusTest, UpdatesContinueAReleaseSequenceAndStoresDoNot) {
  for (bool updates : {true, false}) {
    const Outcomes outcomes = OutcomesOf({[updates](Shared& s, Seen&) {
                                            s.x.store(1, kRelaxed);
                                            s.y.store(1, kRelease);
                                            if (updates) {
                                              s.y.fetch_add(1, kRelaxed);
                                            } else {
                                              s.y.store(2, kRelaxed);
                                            }
                                          },
                                          [](Shared& s, Seen& seen) {
                                            seen.a = s.y.load(kAcquire);
                                            seen.b = s.x.load(kRelaxed);
                                          }});
    EXPECT_EQ(outcomes.values.count("00 20 ") > 0, !updates);
    EXPECT_EQ(outcomes.values.count("00 21 "), 1u);
  }
}

TEST(LitmusTest, WhatIsNotModelledIsAViolation) {
  const std::pair<Body, const char*> cases[] = {
      {[](Shared&, Seen&) { std::atomic_thread_fence(kAcquire); }, "a fence"},
      {[](Shared& s, Seen& seen) { s.x.compare_exchange_strong(seen.a, 1); },
       "a compare-and-exchange"}};
  for (const auto& [body, what] : cases) {
    EXPECT_THAT(OutcomesOf({body}).result.violation, HasSubstr(what));
  }
}

TEST(LitmusTest, UpdatesAreNotLost) {
  const Body add = [](Shared& s, Seen& seen) {
    seen.a = s.x.fetch_add(1, kRelaxed);
  };
  EXPECT_THAT(OutcomesOf({add, add, add}).values,
              ElementsAre("00 10 20 ", "00 20 10 ", "10 00 20 ", "10 20 00 ",
                          "20 00 10 ", "20 10 00 "));
}

std::vector<Body> GuardedPlain(std::memory_order store,
                               std::memory_order load) {
  return {[store](Shared& s, Seen&) {
            s.plain = 7;
            s.y.store(1, store);
          },
          [load](Shared& s, Seen& seen) {
            seen.a = s.y.load(load);
            if (seen.a == 1) seen.b = s.plain;
          }};
}

TEST(LitmusTest, PlainAccessesRaceUnlessOrdered) {
  const Outcomes ordered = OutcomesOf(GuardedPlain(kRelease, kAcquire));
  EXPECT_THAT(ordered.result.violation, IsEmpty()) << ordered.result;
  EXPECT_THAT(ordered.values, ElementsAre("00 00 ", "00 17 "));
  for (auto [store, load] :
       {std::pair(kRelaxed, kAcquire), std::pair(kRelease, kRelaxed)}) {
    EXPECT_THAT(OutcomesOf(GuardedPlain(store, load)).result.violation,
                HasSubstr("data race"));
  }
  // The race is found whatever values are seen, even where there is no choice.
  EXPECT_THAT(OutcomesOf({[](Shared& s, Seen&) { s.plain = 1; },
                          [](Shared& s, Seen& seen) { seen.a = s.plain; }})
                  .result.violation,
              HasSubstr("data race"));
}

// Independent threads have one order; two threads that conflict in k places
// have as many as differ.
TEST(LitmusTest, ExploresNoOrderTwice) {
  const Outcomes independent =
      OutcomesOf({[](Shared& s, Seen&) { s.x.store(1, kRelaxed); },
                  [](Shared& s, Seen&) { s.y.store(1, kRelaxed); },
                  [](Shared& s, Seen&) { s.z.store(1, kRelaxed); }});
  EXPECT_EQ(independent.result.executions, 1);
  const Body thrice = [](Shared& s, Seen&) {
    for (int i = 0; i < 3; ++i) s.x.fetch_add(1, kRelaxed);
  };
  const Outcomes conflicting = OutcomesOf({thrice, thrice});
  EXPECT_EQ(conflicting.result.completed, 20);  // 6 over 3
  EXPECT_THAT(conflicting.result.violation, IsEmpty());
}

TEST(LitmusTest, ABoundOnPreemptionsLeavesOut) {
  const Body twice = [](Shared& s, Seen& seen) {
    seen.a = s.x.fetch_add(1, kRelaxed);
    seen.b = s.x.fetch_add(1, kRelaxed);
  };
  CheckOptions options;
  const int numbers[] = {2, 4, 6};  // how many of the 6 orders of aabb
  for (int bound : {0, 1, 2}) {
    options.max_preemptions = bound;
    EXPECT_EQ(OutcomesOf({twice, twice}, options).values.size(),
              numbers[bound]);
  }
}

TEST(LitmusTest, NeighboursInAWordDoNotRace) {
  const Outcomes outcomes =
      OutcomesOf({[](Shared& s, Seen&) { s.plain = 1; },
                  [](Shared& s, Seen&) { s.z.store(1, kRelaxed); }});
  EXPECT_THAT(outcomes.result.violation, IsEmpty()) << outcomes.result;
}

}  // namespace
}  // namespace fsdp::interleavings
