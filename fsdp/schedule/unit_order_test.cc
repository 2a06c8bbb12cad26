#include "fsdp/schedule/unit_order.h"

#include <vector>

#include "gtest/gtest.h"

namespace fsdp {
namespace {

constexpr int kNone = UnitOrder::kNone;

void RunForward(const std::vector<int>& units, UnitOrder& order) {
  order.BeginForward();
  for (int unit : units) {
    order.AddForward(unit);
    order.AddExpectedBackward(unit);
  }
  order.EndForward();
}

TEST(UnitOrderTest, TheFirstForwardHasNothingToGoBy) {
  UnitOrder order;
  order.BeginForward();
  EXPECT_EQ(order.NextInForward(0), kNone);
  EXPECT_EQ(order.ToComeInForward(0), kNone);
}

TEST(UnitOrderTest, ForwardGoesLikeTheOneBefore) {
  UnitOrder order;
  RunForward({0, 2, 1}, order);
  order.BeginForward();
  EXPECT_EQ(order.NextInForward(0), 2);
  EXPECT_EQ(order.ToComeInForward(0), 2);
  EXPECT_EQ(order.ToComeInForward(1), 1);
  EXPECT_EQ(order.ToComeInForward(2), kNone);
  EXPECT_EQ(order.NextInForward(5), kNone);  // one that was not expected
  EXPECT_EQ(order.NextInForward(2), 1);
  EXPECT_EQ(order.NextInForward(1), kNone);
}

TEST(UnitOrderTest, BackwardGoesLikeTheForwardInReverse) {
  UnitOrder order;
  RunForward({0, 1, 2, 1}, order);
  order.BeginBackward();
  EXPECT_EQ(order.ToComeInBackward(0), 1);
  EXPECT_EQ(order.NextInBackward(1), 2);
  EXPECT_EQ(order.ToComeInBackward(0), 2);
  EXPECT_EQ(order.ToComeInBackward(2), 0);
  EXPECT_EQ(order.ToComeInBackward(3), kNone);
  EXPECT_EQ(order.NextInBackward(5), kNone);
  EXPECT_EQ(order.NextInBackward(2), 1);
  EXPECT_EQ(order.NextInBackward(0), kNone);
}

TEST(UnitOrderTest, AForwardThatIsGivenUpLeavesTheOneBefore) {
  UnitOrder order;
  RunForward({0, 1}, order);
  order.BeginForward();
  order.AddForward(1);
  order.Forget();
  order.BeginForward();
  EXPECT_EQ(order.NextInForward(0), 1);
}

TEST(UnitOrderTest, AForwardInsideABackwardLeavesNothingToGoBy) {
  UnitOrder order;
  RunForward({0, 1, 2}, order);
  order.BeginBackward();
  order.BeginForward();
  EXPECT_EQ(order.ToComeInBackward(0), kNone);
  EXPECT_EQ(order.NextInBackward(2), kNone);
}

}  // namespace
}  // namespace fsdp
