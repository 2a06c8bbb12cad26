#include "testing/simulation/seed_message.h"

#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::simulation {
namespace {

using ::testing::ElementsAre;

SeedMessage Message() {
  SeedMessage message;
  message.seed = int64_t{1} << 40;
  message.result.log_hash = ~uint64_t{1};
  message.result.events = 77;
  message.result.problem = std::string("a\0b\n", 4);
  message.result.features = {"", "two"};
  return message;
}

void ExpectIsMessage(const std::optional<SeedMessage>& found) {
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->seed, int64_t{1} << 40);
  EXPECT_EQ(found->result.log_hash, ~uint64_t{1});
  EXPECT_EQ(found->result.events, 77);
  EXPECT_EQ(found->result.problem, std::string("a\0b\n", 4));
  EXPECT_THAT(found->result.features, ElementsAre("", "two"));
}

TEST(SeedMessageTest, ComesInAnyPieces) {
  const std::string whole = ToBytes(Message());
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    std::string bytes = whole.substr(0, cut);
    EXPECT_FALSE(TakeMessage(bytes).has_value()) << cut;
    EXPECT_EQ(bytes.size(), cut);
    bytes += whole.substr(cut);
    ExpectIsMessage(TakeMessage(bytes));
    EXPECT_EQ(bytes, "");
  }
}

TEST(SeedMessageTest, SeveralAreTakenInTheirOrder) {
  SeedMessage other;
  other.seed = 5;
  std::string bytes = ToBytes(Message()) + ToBytes(other);
  ExpectIsMessage(TakeMessage(bytes));
  EXPECT_EQ(TakeMessage(bytes)->seed, 5);
  EXPECT_FALSE(TakeMessage(bytes).has_value());
}

}  // namespace
}  // namespace fsdp::simulation
