#include "fsdp/runtime/step_log.h"

#include <string>

#include "fsdp/schedule/schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
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

}  // namespace
}  // namespace fsdp
