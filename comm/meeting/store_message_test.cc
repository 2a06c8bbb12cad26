#include "comm/meeting/store_message.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;

std::string Frame(const StoreMessage& message) {
  return EncodeFrame(message).value();
}

void ExpectSame(const StoreMessage& a, const StoreMessage& b) {
  EXPECT_EQ(a.code, b.code);
  EXPECT_EQ(a.number, b.number);
  EXPECT_EQ(a.texts, b.texts);
}

std::vector<StoreMessage> SomeMessages() {
  return {{0, 0, {}},
          {255, -1, {""}},
          {1, std::numeric_limits<int64_t>::min(), {"key", ""}},
          {2, std::numeric_limits<int64_t>::max(), {"", "", ""}},
          {7, 300, {std::string(3, '\0'), "\xff\n", std::string(70'000, 'x')}}};
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

TEST(FrameTest, MessagesThatComeInPieces) {
  std::string all;
  for (const StoreMessage& message : SomeMessages()) all += Frame(message);
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{64}, all.size()}) {
    FrameReader reader;
    size_t read = 0;
    for (size_t at = 0; at < all.size(); at += piece) {
      reader.Append(absl::string_view(all).substr(at, piece));
      for (;;) {
        ASSERT_OK_AND_ASSIGN(const auto message, reader.Next());
        if (!message.has_value()) break;
        ExpectSame(*message, SomeMessages()[read++]);
      }
    }
    EXPECT_EQ(read, SomeMessages().size());
  }
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
  ExpectSame(*read, longest);
  EXPECT_THAT(
      EncodeFrame({1, 0, {std::string(kMaxFrameBytes - rest + 1, 'x')}}),
      StatusIs(absl::StatusCode::kInvalidArgument, _));
  EXPECT_THAT(EncodeFrame({1, 0, {std::string(kMaxFrameBytes * 2, 'x')}}),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
}

}  // namespace
}  // namespace fsdp::comm
