#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "comm/meeting/store_session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsNull;
using ::testing::Pointee;

TEST(StoreTableTest, SetsAndFinds) {
  StoreTable table;
  EXPECT_THAT(table.Find("a"), IsNull());
  ASSERT_OK(table.Set("a", "1"));
  ASSERT_OK(table.Set("", ""));
  ASSERT_OK(table.Set("a", "22"));
  EXPECT_THAT(table.Find("a"), Pointee(std::string("22")));
  EXPECT_THAT(table.Find(""), Pointee(std::string("")));
  EXPECT_EQ(table.size(), 2);
  EXPECT_TRUE(table.Delete("a"));
  EXPECT_FALSE(table.Delete("a"));
  EXPECT_THAT(table.Find("a"), IsNull());
}

TEST(StoreTableTest, ComparesBeforeItSets) {
  StoreTable table;
  EXPECT_EQ(table.CompareAndSet("a", "x", "1").value(), "x");
  EXPECT_THAT(table.Find("a"), IsNull());
  EXPECT_EQ(table.CompareAndSet("a", "", "1").value(), "1");
  EXPECT_EQ(table.CompareAndSet("a", "", "2").value(), "1");
  EXPECT_EQ(table.CompareAndSet("a", "1", "2").value(), "2");
  EXPECT_THAT(table.Find("a"), Pointee(std::string("2")));
}

TEST(StoreTableTest, Adds) {
  StoreTable table;
  EXPECT_EQ(table.Add("a", 0).value(), 0);
  EXPECT_THAT(table.Find("a"), Pointee(std::string("0")));
  EXPECT_EQ(table.Add("a", 5).value(), 5);
  EXPECT_EQ(table.Add("a", -7).value(), -2);
  ASSERT_OK(table.Set("text", "1x"));
  EXPECT_THAT(table.Add("text", 1),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
  ASSERT_OK(table.Set("max", "9223372036854775807"));
  EXPECT_THAT(table.Add("max", 1),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
  EXPECT_EQ(table.Add("max", 0).value(), 9223372036854775807);
}

TEST(StoreTableTest, TellsTheFirstKeyThatIsMissing) {
  StoreTable table;
  ASSERT_OK(table.Set("a", ""));
  EXPECT_THAT(table.FirstMissing({}), IsNull());
  EXPECT_THAT(table.FirstMissing({"a"}), IsNull());
  EXPECT_THAT(table.FirstMissing({"a", "c", "b"}), Pointee(std::string("c")));
}

TEST(StoreTableTest, TellsNewKeysOnce) {
  StoreTable table;
  ASSERT_OK(table.Set("a", "1"));
  ASSERT_OK(table.Set("a", "2"));
  ASSERT_OK(table.Add("b", 1));
  ASSERT_OK(table.CompareAndSet("c", "", "1"));
  ASSERT_OK(table.CompareAndSet("d", "x", "1"));
  EXPECT_THAT(table.TakeNewKeys(), ElementsAre("a", "b", "c"));
  EXPECT_THAT(table.TakeNewKeys(), IsEmpty());
  EXPECT_TRUE(table.Delete("a"));
  ASSERT_OK(table.Set("a", "3"));
  EXPECT_THAT(table.TakeNewKeys(), ElementsAre("a"));
}

TEST(StoreTableTest, DeletesWhatBeginsWithAPrefix) {
  StoreTable table(/*max_bytes=*/12);
  for (const char* key : {"a", "a/", "a/1", "b/1"})
    ASSERT_OK(table.Set(key, ""));
  ASSERT_OK(table.Set("a/1", "xyz"));
  EXPECT_EQ(table.DeleteAll("a/"), 2);
  EXPECT_EQ(table.DeleteAll("a/"), 0);
  EXPECT_THAT(table.Find("a"), Pointee(std::string()));
  EXPECT_THAT(table.Find("b/1"), Pointee(std::string()));
  // Their bytes are free again.
  ASSERT_OK(table.Set("c", "1234567"));
  EXPECT_THAT(table.Set("d", ""),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
}

TEST(StoreTableTest, HoldsSoManyBytes) {
  StoreTable table(/*max_bytes=*/10);
  ASSERT_OK(table.Set("abc", "1234567"));
  EXPECT_THAT(table.Set("d", ""),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
  EXPECT_THAT(table.Set("abc", "12345678"),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
  EXPECT_THAT(table.Find("abc"), Pointee(std::string("1234567")));
  ASSERT_OK(table.Set("abc", "7654321"));
  ASSERT_OK(table.Set("abc", ""));
  ASSERT_OK(table.Set("d", "123456"));
  EXPECT_TRUE(table.Delete("d"));
  ASSERT_OK(table.Set("e", "123456"));
  EXPECT_THAT(table.CompareAndSet("f", "", "1"),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
  EXPECT_THAT(table.Add("f", 1),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
  EXPECT_THAT(table.Find("f"), IsNull());
}

}  // namespace
}  // namespace fsdp::comm
