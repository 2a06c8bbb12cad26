#include "tools/checkpoint/tensor_figures.h"

#include <limits>

#include "gtest/gtest.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(TensorFiguresTest, OfFiniteValues) {
  TensorFigures figures;
  figures.Add({3, kNan, 0});
  figures.Add({-4, kInfinity, -kInfinity});
  figures.Add({});
  EXPECT_EQ(figures.finite, 3);
  EXPECT_EQ(figures.zeros, 1);
  EXPECT_EQ(figures.nans, 1);
  EXPECT_EQ(figures.infinities, 2);
  EXPECT_EQ(figures.min, -4);
  EXPECT_EQ(figures.max, 3);
  EXPECT_DOUBLE_EQ(figures.Mean(), -1.0 / 3);
  EXPECT_DOUBLE_EQ(figures.Norm(), 5);
}

TEST(TensorFiguresTest, Differences) {
  Differences differences;
  differences.Add(0, {1, kNan, kInfinity, 0}, {1, kNan, kInfinity, -0.0});
  EXPECT_EQ(differences.elements, 0);
  EXPECT_EQ(differences.at, -1);
  differences.Add(10, {1, 100, 0}, {2, 110, 1e-9});
  EXPECT_EQ(differences.elements, 3);
  EXPECT_EQ(differences.absolute, 10);
  EXPECT_EQ(differences.relative, 1);
  EXPECT_EQ(differences.at, 11);
  EXPECT_EQ(differences.not_finite, 0);
  differences.Add(20, {kNan, kInfinity, kInfinity}, {1, -kInfinity, 5});
  EXPECT_EQ(differences.elements, 6);
  EXPECT_EQ(differences.not_finite, 3);
  EXPECT_EQ(differences.at, 11);
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
