#include "fsdp/runtime/runtime_common.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

std::string Difference(const StepLog& before, const StepLog& after) {
  return DifferenceOf(before, after, [](int unit) {
    return unit == 0 ? std::string("root") : std::string("blocks.0");
  });
}

StepLog Log() {
  static const char memory[2] = {};
  return {{{ActionKind::kGather, 0}, {&memory[0]}, {}},
          {{ActionKind::kWaitReduce, 1}, {}, {&memory[1]}}};
}

TEST(StepLogTest, StepsThatAreAlike) {
  EXPECT_EQ(Difference(Log(), Log()), "");
}

TEST(StepLogTest, NamesWhatHasMoved) {
  const char elsewhere = 0;
  StepLog other = Log();
  other[0].gathered[0] = &elsewhere;
  EXPECT_EQ(Difference(Log(), other),
            "Gather of root: what is gathered lies elsewhere than in the step "
            "before");
  other = Log();
  other[1].reduced[0] = &elsewhere;
  EXPECT_THAT(Difference(Log(), other),
              HasSubstr("WaitReduce of blocks.0: what is reduced lies"));
}

TEST(StepLogTest, NamesOtherActions) {
  StepLog other = Log();
  other[1].action.unit = 0;
  EXPECT_EQ(Difference(Log(), other),
            "WaitReduce of root: the step before did WaitReduce of blocks.0");
  other = Log();
  other.pop_back();
  EXPECT_EQ(Difference(Log(), other),
            "only the step before did WaitReduce of blocks.0");
  EXPECT_EQ(Difference(other, Log()),
            "the step before did no WaitReduce of blocks.0");
}

TEST(StepLogTest, NamesWhereTheHostReadsFlags) {
  StepLog other = Log();
  other[1].read_flags = true;
  EXPECT_THAT(Difference(Log(), other),
              HasSubstr("WaitReduce of blocks.0: this rank has no gradient"));
}

using ::testing::StartsWith;

const std::string kA = "a";
const std::string kB = "b";

TEST(OrderLogTest, EqualOrdersHaveEqualHashesAndOthersHaveNot) {
  std::set<uint64_t> hashes;
  const auto hash = [](auto fill) {
    OrderLog log;
    fill(log);
    return log.hash();
  };
  const auto gather_a = [](OrderLog& log) {
    log.Add(ActionKind::kGather, 0, kA, 8, c10::kFloat);
  };
  const auto gather_b = [](OrderLog& log) {
    log.Add(ActionKind::kGather, 1, kB, 8, c10::kFloat);
  };
  EXPECT_EQ(hash(gather_a), hash(gather_a));
  hashes.insert(hash([](OrderLog&) {}));
  hashes.insert(hash(gather_a));
  hashes.insert(hash(gather_b));
  hashes.insert(hash([&](OrderLog& log) { gather_a(log), gather_b(log); }));
  hashes.insert(hash([&](OrderLog& log) { gather_b(log), gather_a(log); }));
  hashes.insert(hash([](OrderLog& log) {
    log.Add(ActionKind::kReduce, 0, kA, 8, c10::kFloat);
  }));
  hashes.insert(hash([](OrderLog& log) {
    log.Add(ActionKind::kGather, 0, kA, 4, c10::kFloat);
  }));
  hashes.insert(hash([](OrderLog& log) {
    log.Add(ActionKind::kGather, 0, kA, 8, c10::kHalf);
  }));
  EXPECT_EQ(hashes.size(), 8u);
}

TEST(OrderLogTest, ClearStartsAnew) {
  OrderLog log;
  const uint64_t nothing = log.hash();
  log.Add(ActionKind::kReplicate, 0, kA, 8, c10::kFloat);
  EXPECT_EQ(log.ToString(), "all-reduce a, 8 bytes Float\n");
  log.Clear();
  EXPECT_EQ(log.hash(), nothing);
  EXPECT_EQ(log.ToString(), "");
}

// For example, a server never runs a backward.
TEST(OrderLogTest, KeepsTheTextOfTheFirstOnes) {
  OrderLog log;
  for (int i = 0; i < 10'003; ++i) {
    log.Add(ActionKind::kGather, 0, i == 0 ? kA : kB, 8, c10::kFloat);
  }
  EXPECT_THAT(log.ToString(), StartsWith("all-gather a, 8 bytes Float\n"));
  EXPECT_THAT(log.ToString(), ::testing::EndsWith("Float\nand 3 more\n"));
}

}  // namespace
}  // namespace fsdp::testing
