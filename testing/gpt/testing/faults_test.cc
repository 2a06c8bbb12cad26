#include "testing/gpt/testing/faults.h"

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FaultPlanTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(
      const std::vector<Fault> plan,
      ParseFaultPlan("fault=segv,restart=2,replica=4,rank=3,step=40,"
                     "operation=reduce_scatter,call=5,when=wait;fault=nan"));
  ASSERT_EQ(plan.size(), 2);
  EXPECT_EQ(plan[0].kind, FaultKind::kSegv);
  EXPECT_EQ(plan[0].restart, 2);
  EXPECT_EQ(plan[0].replica, 4);
  EXPECT_EQ(plan[0].rank, 3);
  EXPECT_EQ(plan[0].step, 40);
  EXPECT_EQ(plan[0].operation, fsdp::comm::Collective::kReduceScatter);
  EXPECT_EQ(plan[0].call, 5);
  EXPECT_TRUE(plan[0].in_wait);
  EXPECT_EQ(plan[1].kind, FaultKind::kNan);
  EXPECT_EQ(plan[1].rank, 0);
  EXPECT_EQ(plan[1].step, 1);
  EXPECT_FALSE(plan[1].in_wait);
  ASSERT_OK_AND_ASSIGN(const std::vector<Fault> none, ParseFaultPlan(""));
  EXPECT_TRUE(none.empty());
}

TEST(FaultPlanTest, EveryNameIsRead) {
  for (const char* name : {"kill", "stop", "segv", "abort", "throw", "error",
                           "exit", "nan", "slow"}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<Fault> plan,
                         ParseFaultPlan(absl::StrCat("fault=", name)));
    EXPECT_EQ(Name(plan[0].kind), name);
  }
}

TEST(FaultPlanTest, FindsTheFaultOfARankInAnAttempt) {
  ASSERT_OK_AND_ASSIGN(
      const std::vector<Fault> plan,
      ParseFaultPlan("fault=kill,rank=1;fault=stop,rank=1,restart=1;"
                     "fault=segv,rank=1,replica=2"));
  EXPECT_EQ(FaultOf(plan, 0, 0, 1)->kind, FaultKind::kKill);
  EXPECT_EQ(FaultOf(plan, 1, 0, 1)->kind, FaultKind::kStop);
  EXPECT_EQ(FaultOf(plan, 0, 2, 1)->kind, FaultKind::kSegv);
  EXPECT_FALSE(FaultOf(plan, 0, 0, 0).has_value());
  EXPECT_FALSE(FaultOf(plan, 2, 0, 1).has_value());
  EXPECT_FALSE(FaultOf(plan, 0, 1, 1).has_value());
}

TEST(FaultPlanTest, NamesWhatIsWrong) {
  const struct {
    const char* text;
    const char* part;
  } cases[] = {
      {"fault=flood", "fault=flood: expected one of kill, stop"},
      {"fault=kill,step=0", "step=0: expected a number of at least 1"},
      {"fault=kill,rank=x", "rank=x"},
      {"fault=kill,when=never", "when=never: expected one of start, wait"},
      {"fault=kill,color=red", "color=red: expected fault, restart"},
      {"rank=1", "a fault in each entry"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(ParseFaultPlan(c.text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("fault plan"), HasSubstr(c.part))))
        << c.text;
  }
}

}  // namespace
}  // namespace gpt
