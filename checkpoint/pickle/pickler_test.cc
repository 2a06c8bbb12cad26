#include "checkpoint/pickle/pickler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"
#include "checkpoint/pickle/unpickler.h"

namespace fsdp::checkpoint {
namespace {

class PicklerTest : public ::testing::TestWithParam<int> {
 protected:
  const AllowList allowed_{{"torch.Size"}};
};

TEST_P(PicklerTest, IntegersOfAllLengthsComeBack) {
  std::vector<int64_t> values = {0, std::numeric_limits<int64_t>::min(),
                                 std::numeric_limits<int64_t>::max()};
  for (int bit = 0; bit < 63; ++bit) {
    for (const int64_t by : {-1, 0, 1}) {
      values.push_back((int64_t{1} << bit) + by);
      values.push_back(-(int64_t{1} << bit) + by);
    }
  }
  Pickler pickler(GetParam());
  pickler.EmptyList();
  pickler.Mark();
  for (const int64_t value : values) pickler.Int(value);
  pickler.Appends();
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Unpickle(std::move(pickler).Finish(), allowed_));
  ASSERT_EQ(document.root().items.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(document[document.root().items[i]].integer, values[i]);
  }
}

TEST_P(PicklerTest, ScalarsAndCallsComeBack) {
  Pickler pickler(GetParam());
  pickler.EmptyDict();
  pickler.Mark();
  pickler.String("none");
  pickler.None();
  pickler.String("real");
  pickler.Double(-0.1);
  pickler.String("true");
  pickler.Bool(true);
  pickler.String("size");
  pickler.Global("torch", "Size");
  pickler.Mark();
  pickler.EmptyTuple();
  pickler.Tuple();
  pickler.Reduce();
  pickler.SetItems();
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Unpickle(std::move(pickler).Finish(), allowed_));
  const std::vector<NodeId>& items = document.root().items;
  ASSERT_EQ(items.size(), 8u);
  EXPECT_EQ(document[items[1]].kind, NodeKind::kNone);
  EXPECT_EQ(document[items[3]].real, -0.1);
  EXPECT_EQ(document[items[5]].kind, NodeKind::kBool);
  EXPECT_EQ(document[document[items[7]].global].text, "torch.Size");
}

// More than a byte counts.
TEST_P(PicklerTest, TextsAndNamesAreWrittenOnce) {
  constexpr int kTexts = 601;
  const auto write = [] {
    Pickler pickler(GetParam());
    pickler.EmptyList();
    pickler.Mark();
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < kTexts; ++i) {
        pickler.String(absl::StrCat("a text with a number: ", i));
      }
      pickler.Global("torch", "Size");
    }
    pickler.Appends();
    return std::move(pickler).Finish();
  };
  const std::string pickle = write();
  EXPECT_EQ(pickle, write());
  EXPECT_LT(pickle.size(), kTexts * (25 + 5 + 5 + 2 * 5u) + 50);
  ASSERT_OK_AND_ASSIGN(const Document document, Unpickle(pickle, allowed_));
  const std::vector<NodeId>& items = document.root().items;
  ASSERT_EQ(items.size(), 3u * (kTexts + 1));
  EXPECT_EQ(document[items[size_t{2} * kTexts]].text,
            "a text with a number: 600");
  EXPECT_EQ(items.front(), items[kTexts + 1]);
  EXPECT_EQ(items.back(), items[kTexts]);
}

TEST_P(PicklerTest, LongTexts) {
  for (const size_t size : {0, 1, 255, 256, 70001}) {
    Pickler pickler(GetParam());
    pickler.String(std::string(size, 'x'));
    ASSERT_OK_AND_ASSIGN(const Document document,
                         Unpickle(std::move(pickler).Finish(), allowed_));
    EXPECT_EQ(document.root().text.size(), size);
  }
}

INSTANTIATE_TEST_SUITE_P(Protocols, PicklerTest, ::testing::Values(2, 4));

TEST(PicklerOfProtocol4Test, Bytes) {
  Pickler pickler(4);
  pickler.Bytes(std::string("\0\xff", 2));
  const AllowList none({});
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Unpickle(std::move(pickler).Finish(), none));
  EXPECT_EQ(document.root().kind, NodeKind::kBytes);
  EXPECT_EQ(document.root().text, absl::string_view("\0\xff", 2));
}

}  // namespace
}  // namespace fsdp::checkpoint
