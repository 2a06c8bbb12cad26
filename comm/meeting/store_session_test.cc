#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/hmac.h"
#include "base/testing/status_matchers.h"
#include "comm/meeting/store_message.h"
#include "comm/meeting/store_server.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::Pointee;

const absl::Time kNow = absl::UnixEpoch();
constexpr char kSecret[] = "of the job";

std::string ListenerNonce() { return std::string(kNonceBytes, 'l'); }
std::string CallerNonce() { return std::string(kNonceBytes, 'c'); }

std::string Claim(absl::string_view secret = kSecret) {
  return absl::StrCat(kStoreMagic, CallerNonce(),
                      CallerProof(secret, ListenerNonce(), CallerNonce()));
}

std::string Ask(StoreAsk ask, std::vector<std::string> texts,
                int64_t number = 0) {
  return EncodeFrame({static_cast<uint8_t>(ask), number, std::move(texts)})
      .value();
}

class StoreSessionTest : public ::testing::Test {
 protected:
  StoreSession Session() { return {kSecret, ListenerNonce(), &table_}; }

  // Returns the session of an accepted caller.
  StoreSession Accepted() {
    StoreSession session = Session();
    EXPECT_OK(session.Receive(Claim(), kNow));
    session.output().clear();
    return session;
  }

  // Takes the only answer there is, as if it were sent.
  static StoreMessage Answer(StoreSession& session) {
    FrameReader reader;
    reader.Append(session.output());
    session.output().clear();
    const auto message = reader.Next();
    EXPECT_TRUE(message.ok() && message->has_value());
    EXPECT_EQ(reader.Next().value(), std::nullopt);
    if (!message.ok() || !message->has_value()) return {};
    return **message;
  }

  static void ExpectDone(const StoreMessage& message) {
    EXPECT_EQ(message.code, static_cast<uint8_t>(StoreReply::kDone));
  }

  StoreTable table_;
};

TEST_F(StoreSessionTest, BothShowThatTheyKnowTheSecret) {
  StoreSession session = Session();
  EXPECT_EQ(session.output(), absl::StrCat(kStoreMagic, ListenerNonce()));
  EXPECT_EQ(session.output().size(), kGreetingBytes);
  session.output().clear();
  EXPECT_FALSE(session.accepted());
  ASSERT_OK(session.Receive(Claim(), kNow));
  EXPECT_TRUE(session.accepted());
  EXPECT_EQ(session.output(),
            ListenerProof(kSecret, ListenerNonce(), CallerNonce()));
  EXPECT_NE(session.output(),
            CallerProof(kSecret, ListenerNonce(), CallerNonce()));
}

// A proof for one connection is wrong for the next.
TEST_F(StoreSessionTest, ProofsAreOfTheirNonces) {
  StoreSession session(kSecret, std::string(kNonceBytes, 'm'), &table_);
  EXPECT_THAT(session.Receive(Claim(), kNow),
              StatusIs(absl::StatusCode::kPermissionDenied, _));
}

TEST_F(StoreSessionTest, StrangersReachNothing) {
  const std::vector<std::string> claims = {
      Claim("of another job"), Claim(""),
      absl::StrCat(kStoreMagic, CallerNonce(),
                   ListenerProof(kSecret, ListenerNonce(), CallerNonce())),
      absl::StrCat(kStoreMagic, CallerNonce(), std::string(kHmacBytes, '\0'))};
  for (const std::string& claim : claims) {
    StoreSession session = Session();
    EXPECT_THAT(session.Receive(claim + Ask(StoreAsk::kSet, {"a", "b"}), kNow),
                StatusIs(absl::StatusCode::kPermissionDenied, _));
    EXPECT_FALSE(session.accepted());
    EXPECT_EQ(session.output().size(), kGreetingBytes);
  }
  EXPECT_EQ(table_.size(), 0);
}

// Another protocol is noticed as soon as it can be.
TEST_F(StoreSessionTest, OtherProtocolsAreHungUpOn) {
  for (const char* text : {"GET / HTTP/1.1\r\n", "\x16\x03\x01", "FSDPjob0"}) {
    StoreSession session = Session();
    EXPECT_THAT(session.Receive(text, kNow),
                StatusIs(absl::StatusCode::kInvalidArgument, _));
  }
}

TEST_F(StoreSessionTest, AClaimMayComeByteByByte) {
  StoreSession session = Session();
  session.output().clear();
  const std::string bytes = Claim() + Ask(StoreAsk::kSet, {"a", "1"});
  for (const char byte : bytes) {
    ASSERT_OK(session.Receive(std::string(1, byte), kNow));
    if (session.accepted() && session.output().size() == kWelcomeBytes) {
      session.output().clear();
    }
  }
  EXPECT_TRUE(session.accepted());
  ExpectDone(Answer(session));
  EXPECT_EQ(*table_.Find("a"), "1");
}

TEST_F(StoreSessionTest, DeletesWhatBeginsWithATextButNotAll) {
  StoreSession session = Accepted();
  for (const char* key : {"a/1", "a/2", "b"}) ASSERT_OK(table_.Set(key, ""));
  ASSERT_OK(session.Receive(Ask(StoreAsk::kDeleteAll, {"a/"}), kNow));
  EXPECT_EQ(Answer(session).number, 2);
  ASSERT_OK(session.Receive(Ask(StoreAsk::kDeleteAll, {""}), kNow));
  EXPECT_EQ(Answer(session).code, static_cast<uint8_t>(StoreReply::kRefused));
  EXPECT_EQ(table_.size(), 1);
}

TEST_F(StoreSessionTest, AWaitEndsWhenAllKeysAreThere) {
  StoreSession session = Accepted();
  ASSERT_OK(table_.Set("a", ""));
  constexpr absl::Duration kLong = absl::Hours(24 * 20);
  ASSERT_OK(session.Receive(
      Ask(StoreAsk::kWait, {"a", "b", "c"}, absl::ToInt64Milliseconds(kLong)),
      kNow));
  EXPECT_TRUE(session.is_waiting());
  EXPECT_FALSE(session.wants_input());
  EXPECT_EQ(session.missing_key(), "b");
  EXPECT_EQ(session.wait_deadline(), kNow + kLong);
  ASSERT_OK(table_.Set("b", ""));
  ASSERT_OK(session.Advance(kNow));
  EXPECT_EQ(session.missing_key(), "c");
  EXPECT_EQ(session.output(), "");
  ASSERT_OK(table_.Set("c", ""));
  ASSERT_OK(session.Advance(kNow));
  EXPECT_FALSE(session.is_waiting());
  ExpectDone(Answer(session));
}

TEST_F(StoreSessionTest, AWaitEndsAtItsDeadline) {
  StoreSession session = Accepted();
  for (const StoreAsk ask : {StoreAsk::kWait, StoreAsk::kGet}) {
    ASSERT_OK(session.Receive(Ask(ask, {"a"}, 500), kNow));
    ASSERT_OK(session.Advance(kNow + absl::Milliseconds(499)));
    EXPECT_TRUE(session.is_waiting());
    ASSERT_OK(session.Advance(kNow + absl::Milliseconds(500)));
    EXPECT_EQ(Answer(session).code,
              static_cast<uint8_t>(StoreReply::kNotThere));
  }
  ASSERT_OK(session.Receive(Ask(StoreAsk::kWait, {"a"}, -1), kNow));
  EXPECT_EQ(Answer(session).code, static_cast<uint8_t>(StoreReply::kNotThere));
}

// However much is asked for at once, one answer is kept at a time.
TEST_F(StoreSessionTest, AnswersWhenTheAnswerBeforeIsSent) {
  StoreSession session = Accepted();
  std::string asks;
  for (int i = 0; i < 3; ++i) asks += Ask(StoreAsk::kAdd, {"a"}, 1);
  asks += Ask(StoreAsk::kWait, {"b"}, 1000);
  asks += Ask(StoreAsk::kCount, {});
  ASSERT_OK(session.Receive(asks, kNow));
  for (int i = 1; i <= 3; ++i) {
    EXPECT_EQ(Answer(session).number, i);
    ASSERT_OK(session.Advance(kNow));
  }
  EXPECT_TRUE(session.is_waiting());
  ASSERT_OK(table_.Set("b", ""));
  ASSERT_OK(session.Advance(kNow));
  ExpectDone(Answer(session));
  ASSERT_OK(session.Advance(kNow));
  EXPECT_EQ(Answer(session).number, 2);
}

TEST_F(StoreSessionTest, WhatIsNoMessageEndsIt) {
  const std::vector<std::string> bad = {Ask(static_cast<StoreAsk>(0), {}),
                                        Ask(static_cast<StoreAsk>(10), {}),
                                        Ask(StoreAsk::kSet, {"a"}),
                                        Ask(StoreAsk::kSet, {"a", "b", "c"}),
                                        Ask(StoreAsk::kGet, {}),
                                        Ask(StoreAsk::kAdd, {"a", "b"}),
                                        Ask(StoreAsk::kCount, {"a"}),
                                        Ask(StoreAsk::kCompareAndSet, {"a"}),
                                        Ask(StoreAsk::kDelete, {}),
                                        Ask(StoreAsk::kDeleteAll, {}),
                                        std::string(4, '\xff')};
  for (const std::string& bytes : bad) {
    StoreSession session = Accepted();
    EXPECT_THAT(session.Receive(bytes, kNow),
                StatusIs(absl::StatusCode::kInvalidArgument, _));
  }
  EXPECT_EQ(table_.size(), 0);
}

TEST(StoreTableTest, AddsToNumbersOnly) {
  StoreTable table;
  EXPECT_EQ(table.Add("a", 5).value(), 5);
  ASSERT_OK(table.Set("text", "1x"));
  EXPECT_THAT(table.Add("text", 1),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
  ASSERT_OK(table.Set("max", "9223372036854775807"));
  EXPECT_THAT(table.Add("max", 1),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
  EXPECT_EQ(table.Add("max", 0).value(), 9223372036854775807);
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
  // The bytes of deleted keys are free again.
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
  EXPECT_THAT(table.Find("f"), ::testing::IsNull());
}

std::string Frame(const StoreMessage& message) {
  return EncodeFrame(message).value();
}

// The form is that of the network: hosts of any byte order understand it.
TEST(FrameTest, ByteForByte) {
  EXPECT_EQ(Frame({3, 258, {"ab"}}), std::string("\x13\0\0\0"
                                                 "\x03"
                                                 "\x02\x01\0\0\0\0\0\0"
                                                 "\x01\0\0\0"
                                                 "\x02\0\0\0ab",
                                                 23));
}

TEST(FrameTest, WhatIsNoFrame) {
  const std::string good = Frame({3, 258, {"ab"}});
  const auto with = [&good](size_t at, char byte) {
    std::string bytes = good;
    bytes[at] = byte;
    return bytes;
  };
  const std::vector<std::string> bad = {
      "\xff\xff\xff\xff",            // too long
      std::string("\x01\0\0\1", 4),  // by one
      std::string(4, '\0'),          // shorter than any
      with(0, 18) + good,            // than its text
      with(0, 20) + good,            // longer than its text
      with(13, 2),                   // texts that are not there
      with(16, '\x7f'),              // two thousand million
      with(17, 3),                   // a text that goes on
      with(20, '\x7f'),
  };
  for (const std::string& bytes : bad) {
    FrameReader reader;
    reader.Append(bytes);
    EXPECT_THAT(reader.Next(), StatusIs(absl::StatusCode::kInvalidArgument, _))
        << ::testing::PrintToString(bytes);
  }
}

TEST(FrameTest, TheLongest) {
  const size_t rest = Frame({1, 0, {""}}).size() - 4;
  FrameReader reader;
  const StoreMessage longest{1, 0, {std::string(kMaxFrameBytes - rest, 'x')}};
  reader.Append(Frame(longest));
  ASSERT_OK_AND_ASSIGN(const auto read, reader.Next());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->texts, longest.texts);
  EXPECT_THAT(
      EncodeFrame({1, 0, {std::string(kMaxFrameBytes - rest + 1, 'x')}}),
      StatusIs(absl::StatusCode::kInvalidArgument, _));
  EXPECT_THAT(EncodeFrame({1, 0, {std::string(kMaxFrameBytes * 2, 'x')}}),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
}

}  // namespace
}  // namespace fsdp::comm
