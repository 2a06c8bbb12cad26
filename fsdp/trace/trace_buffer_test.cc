#include "fsdp/trace/trace_buffer.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Kind = TraceScope::Kind;

std::vector<std::string> Names(const TraceBuffer& buffer) {
  std::vector<std::string> names;
  for (const TraceBuffer::Record& record : buffer.Records()) {
    names.push_back(absl::StrCat(buffer.name(record.name), " ", record.begin_ns,
                                 "-", record.end_ns));
  }
  return names;
}

TEST(ParseScopeTest, KnowsEveryEventAndAction) {
  for (int i = 0; i <= static_cast<int>(ActionKind::kCloseShards); ++i) {
    const auto action = static_cast<ActionKind>(i);
    const std::string range = absl::StrCat("fsdp::", Name(action), "(a.0)");
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kAction) << range;
    EXPECT_EQ(parsed.scope.action, action) << range;
    EXPECT_EQ(parsed.name, "a.0") << range;
  }
  for (int i = 0; i <= static_cast<int>(EventKind::kRelease); ++i) {
    const auto event = static_cast<EventKind>(i);
    const std::string range = absl::StrCat("fsdp::", Name(event), "(root)");
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kEvent) << range;
    EXPECT_EQ(parsed.scope.event, event) << range;
    EXPECT_EQ(parsed.name, "root") << range;
  }
  EXPECT_EQ(ParseScope("fsdp::CheckOrder(root)").scope.kind, Kind::kOrderCheck);
}

TEST(ParseScopeTest, AnythingElseIsTheUsers) {
  for (const char* range :
       {"", "data", "fsdp::", "fsdp::Gather", "fsdp::Gather(", "Gather(a)",
        "fsdp::Mine(a)", "fsdp::Gather(a) "}) {
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kUser) << range;
    EXPECT_EQ(parsed.name, range);
  }
  EXPECT_EQ(ParseScope("fsdp::Gather(a(0))").name, "a(0)");
}

TEST(TraceBufferTest, AScopeComesBehindThoseInsideIt) {
  TraceBuffer buffer(10);
  buffer.Begin({Kind::kUser}, "outer", 1);
  buffer.Begin({Kind::kUser}, "inner", 2);
  buffer.End(3);
  buffer.End(5);
  EXPECT_THAT(Names(buffer), ElementsAre("inner 2-3", "outer 1-5"));
  EXPECT_EQ(buffer.Records()[0].sequence, 1);
  EXPECT_EQ(buffer.Records()[1].sequence, 0);
}

TEST(TraceBufferTest, OpenScopesAreNotThereYetAndAnEndWithoutBeginIsNothing) {
  TraceBuffer buffer(10);
  buffer.End(1);
  buffer.Begin({Kind::kUser}, "open", 1);
  EXPECT_THAT(Names(buffer), IsEmpty());
  buffer.End(2);
  buffer.End(3);
  EXPECT_THAT(Names(buffer), ElementsAre("open 1-2"));
}

TEST(TraceBufferTest, KeepsTheNewestAndCountsTheOthers) {
  for (const int64_t capacity : {1, 2, 7}) {
    TraceBuffer buffer(capacity);
    for (int64_t i = 0; i < 13; ++i) {
      buffer.Begin({Kind::kUser}, "x", i);
      buffer.End(i);
      std::vector<int64_t> begins;
      for (const auto& record : buffer.Records()) {
        begins.push_back(record.begin_ns);
      }
      std::vector<int64_t> expected;
      for (int64_t k = std::max<int64_t>(0, i + 1 - capacity); k <= i; ++k) {
        expected.push_back(k);
      }
      EXPECT_EQ(begins, expected);
      EXPECT_EQ(buffer.num_dropped(), std::max<int64_t>(0, i + 1 - capacity));
    }
  }
}

TEST(TraceBufferTest, AClockSetBackGivesAnEmptyScope) {
  TraceBuffer buffer(1);
  buffer.Begin({Kind::kUser}, "x", 10);
  buffer.End(4);
  EXPECT_THAT(Names(buffer), ElementsAre("x 10-10"));
}

TEST(TraceBufferTest, ScopesTooDeepAreDropped) {
  constexpr int kDepth = 300;  // more than are followed
  TraceBuffer buffer(1000);
  for (int i = 0; i < kDepth; ++i) buffer.Begin({Kind::kUser}, "x", i);
  for (int i = 0; i < kDepth; ++i) buffer.End(kDepth + i);
  EXPECT_EQ(buffer.Records().size() + buffer.num_dropped(), kDepth);
  EXPECT_GT(buffer.num_dropped(), 0);
  // The innermost record that is kept has its own end.
  const TraceBuffer::Record first = buffer.Records().front();
  EXPECT_EQ(first.begin_ns + first.end_ns, 2 * kDepth - 1);
}

TEST(TraceBufferTest, VeryManyNamesShareOne) {
  TraceBuffer buffer(1);
  for (int i = 0; i < 70'000; ++i) {
    buffer.Begin({Kind::kUser}, absl::StrCat("name ", i), i);
    buffer.End(i);
  }
  EXPECT_THAT(Names(buffer),
              ElementsAre("(one of very many names) 69999-69999"));
}

TEST(TraceBufferTest, UnitsHaveTheBytesTheyWereGivenLast) {
  TraceBuffer buffer(2);
  buffer.Begin({Kind::kAction}, "a", 0);
  buffer.End(1);
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).unsharded, 0);
  buffer.SetUnitBytes("a", {10, 20});
  buffer.SetUnitBytes("b", {30, 40});
  buffer.SetUnitBytes("a", {11, 21});
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).unsharded, 11);
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).reduce_buffer, 21);
}

}  // namespace
}  // namespace fsdp
