#include <cstdint>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/roster_log.h"
#include "replicas/membership/testing/forwarding_registers.h"
#include "replicas/membership/testing/memory_registers.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Notice Join(int replica) {
  return {Notice::Kind::kJoin, {replica, 0}, replica + 10};
}

std::vector<std::string> Texts(const NoticeBoard::Pending& pending) {
  std::vector<std::string> texts;
  texts.reserve(pending.notices.size());
  for (const Notice& notice : pending.notices) texts.push_back(Encode(notice));
  return texts;
}

class CountingRegisters final : public testing::ForwardingRegisters {
 public:
  using ForwardingRegisters::ForwardingRegisters;
  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    ++gets;
    return ForwardingRegisters::Get(key);
  }
  int gets = 0;
};

class NoticeBoardTest : public ::testing::Test {
 protected:
  void Post(int replica) {
    ASSERT_OK_AND_ASSIGN(const int64_t number, others_.Reserve());
    ASSERT_OK(others_.Write(number, Join(replica)));
  }

  testing::MemoryRegisters memory_;
  CountingRegisters registers_{&memory_};
  NoticeBoard board_{&registers_};
  NoticeBoard others_{&memory_};
};

TEST_F(NoticeBoardTest, IsEmptyAtFirst) {
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(0));
  EXPECT_THAT(pending.notices, IsEmpty());
  EXPECT_EQ(pending.seen, 0);
}

TEST_F(NoticeBoardTest, NoticesComeInTheirOrder) {
  Post(2);
  Post(0);
  Post(1);
  ASSERT_OK_AND_ASSIGN(auto pending, board_.ReadAfter(0));
  EXPECT_THAT(Texts(pending),
              ElementsAre("join 2.0 12", "join 0.0 10", "join 1.0 11"));
  EXPECT_EQ(pending.seen, 3);
  ASSERT_OK_AND_ASSIGN(pending, board_.ReadAfter(1));
  EXPECT_THAT(Texts(pending), ElementsAre("join 0.0 10", "join 1.0 11"));
  ASSERT_OK_AND_ASSIGN(pending, board_.ReadAfter(3));
  EXPECT_THAT(Texts(pending), IsEmpty());
  EXPECT_EQ(pending.seen, 3);
}

TEST_F(NoticeBoardTest, EachIsAskedForOnce) {
  Post(0);
  Post(1);
  ASSERT_OK(board_.ReadAfter(0));
  Post(2);
  registers_.gets = 0;
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(1));
  EXPECT_THAT(Texts(pending), ElementsAre("join 1.0 11", "join 2.0 12"));
  EXPECT_EQ(registers_.gets, 2);  // how many there are, and the last
}

TEST_F(NoticeBoardTest, OneThatIsNotWrittenIsLeftOutUntilItIs) {
  ASSERT_OK_AND_ASSIGN(const int64_t number, others_.Reserve());
  EXPECT_EQ(number, 1);
  Post(1);
  ASSERT_OK_AND_ASSIGN(auto pending, board_.ReadAfter(0));
  EXPECT_THAT(Texts(pending), ElementsAre("join 1.0 11"));
  EXPECT_EQ(pending.seen, 2);
  ASSERT_OK(others_.Write(number, Join(0)));
  ASSERT_OK_AND_ASSIGN(pending, board_.ReadAfter(0));
  EXPECT_THAT(Texts(pending), ElementsAre("join 0.0 10", "join 1.0 11"));
}

TEST_F(NoticeBoardTest, WhatIsNoNoticeIsLeftOut) {
  Post(0);
  ASSERT_OK(memory_.Set("membership/notice/1", "text"));
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(0));
  EXPECT_THAT(Texts(pending), IsEmpty());
  EXPECT_EQ(pending.seen, 1);
}

TEST_F(NoticeBoardTest, WhatIsForgottenIsRemoved) {
  for (int replica = 0; replica < 3; ++replica) Post(replica);
  board_.Forget(0, 2);
  EXPECT_EQ(memory_.size(), 2u);  // how many there were, and the last
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(2));
  EXPECT_THAT(Texts(pending), ElementsAre("join 2.0 12"));
}

TEST_F(NoticeBoardTest, ManyComeInParts) {
  ASSERT_OK(memory_.Add("membership/notices", 5000));
  ASSERT_OK_AND_ASSIGN(auto pending, board_.ReadAfter(10));
  EXPECT_EQ(pending.seen, 4106);
  ASSERT_OK_AND_ASSIGN(pending, board_.ReadAfter(pending.seen));
  EXPECT_EQ(pending.seen, 5000);
}

TEST_F(NoticeBoardTest, RegistersThatForgotAreNoticed) {
  Post(0);
  EXPECT_OK(board_.ReadAfter(1));
  EXPECT_THAT(board_.ReadAfter(2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has lost what it kept: 1 notices, of which "
                                 "2 were read before")));
  ASSERT_OK(memory_.Set("membership/notices", "text"));
  EXPECT_THAT(board_.ReadAfter(0), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("membership/notices")));
}

}  // namespace
}  // namespace fsdp::replicas
