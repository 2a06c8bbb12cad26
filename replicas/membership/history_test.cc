#include "replicas/membership/history.h"

#include <cstdint>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Span From(int64_t step, const std::vector<int>& replicas) {
  Span span;
  span.from_step = step;
  span.replicas.reserve(replicas.size());
  for (const int replica : replicas) span.replicas.push_back({replica, 0});
  return span;
}

std::vector<int> At(const History& history, int64_t step) {
  std::vector<int> replicas;
  for (const ReplicaId& id : history.ReplicasAt(step)) {
    replicas.push_back(id.replica);
  }
  return replicas;
}

TEST(HistoryTest, LinesAsTheyAreDocumented) {
  Roster roster;
  roster.step = 7;
  roster.members = {{{0, 1}, true}, {{2, 1}, false}};
  EXPECT_EQ(ToLine(ToSpan(roster)), "from step 7: replicas 0.1 2.1");
}

TEST(HistoryTest, ASpanIsForAllStepsUpToTheNext) {
  History history;
  EXPECT_THAT(history.ReplicasAt(0), IsEmpty());
  EXPECT_TRUE(history.Add(From(2, {0, 1})));
  EXPECT_TRUE(history.Add(From(5, {1})));
  EXPECT_EQ(At(history, 1), std::vector<int>({}));
  EXPECT_EQ(At(history, 2), std::vector<int>({0, 1}));
  EXPECT_EQ(At(history, 4), std::vector<int>({0, 1}));
  EXPECT_EQ(At(history, 5), std::vector<int>({1}));
  EXPECT_EQ(At(history, 1000), std::vector<int>({1}));
}

TEST(HistoryTest, TheSameAgainIsNothingNew) {
  History history;
  EXPECT_TRUE(history.Add(From(0, {0, 1})));
  EXPECT_FALSE(history.Add(From(0, {0, 1})));
  EXPECT_FALSE(history.Add(From(3, {0, 1})));
  EXPECT_EQ(history.spans().size(), 1u);
  // Another life of a replica is.
  EXPECT_TRUE(history.Add({3, {{0, 0}, {1, 1}}}));
}

TEST(HistoryTest, AStepThatWasLostIsOfThoseWhoFinishedIt) {
  History history;
  history.Add(From(0, {0, 1}));
  history.Add(From(7, {0, 1, 2}));
  EXPECT_TRUE(history.Add(From(7, {0, 2})));
  EXPECT_EQ(history.ToText(),
            "from step 0: replicas 0.0 1.0\nfrom step 7: replicas 0.0 2.0\n");
  // Back to who it was before: a line, but no span.
  EXPECT_TRUE(history.Add(From(7, {0, 1})));
  EXPECT_EQ(history.ToText(), "from step 0: replicas 0.0 1.0\n");
}

TEST(HistoryTest, AfterAFoundingLaterStepsWereNot) {
  History history;
  history.Add(From(0, {0, 1}));
  history.Add(From(4, {0}));
  history.Add(From(9, {0, 2}));
  EXPECT_TRUE(history.Add(From(6, {0})));
  EXPECT_EQ(history.spans().size(), 2u);
  EXPECT_EQ(At(history, 9), std::vector<int>({0}));
  EXPECT_TRUE(history.Add(From(2, {0, 1})));
  EXPECT_EQ(history.ToText(), "from step 0: replicas 0.0 1.0\n");
  EXPECT_TRUE(history.Add(From(0, {2})));
  EXPECT_EQ(history.ToText(), "from step 0: replicas 2.0\n");
}

TEST(HistoryTest, AFileOfItsLinesIsIt) {
  History history;
  std::string file = "# of a run\n\n";
  for (const Span& span :
       {From(0, {0, 1, 2}), From(3, {0, 2}), From(3, {2}), From(8, {0, 2}),
        From(9, {0, 2}), From(3, {0, 2}), From(1, {0, 1, 2})}) {
    if (history.Add(span)) file += ToLine(span) + "\n";
    ASSERT_OK_AND_ASSIGN(const History read, History::Parse(file));
    EXPECT_EQ(read.ToText(), history.ToText());
  }
  ASSERT_OK_AND_ASSIGN(const History empty, History::Parse(""));
  EXPECT_THAT(empty.spans(), IsEmpty());
}

TEST(HistoryTest, WhatIsNoLineIsNamed) {
  for (const std::string line :
       {"from step 3:", "from step 3: replicas", "from step 3: replicas ",
        "from step x: replicas 0.0", "from step -1: replicas 0.0",
        "from step 03: replicas 0.0", "from step 3 : replicas 0.0",
        "from step 3: replicas 1.0 0.0", "from step 3: replicas 0.0 0.1",
        "from step 3: replicas 0.0  1.0", "from step 3: replicas 0",
        "from step 3: replicas 0.0 ", " from step 3: replicas 0.0",
        "from step 3: replicas 1024.0", "to step 3: replicas 0.0",
        "from step 9223372036854775808: replicas 0.0"}) {
    EXPECT_THAT(History::Parse("from step 0: replicas 0.0\n" + line),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("line 2 of the history is \"" + line)));
  }
  EXPECT_THAT(History::Parse(std::string(kMaxHistoryBytes + 1, '\n')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("long")));
}

}  // namespace
}  // namespace fsdp::replicas
