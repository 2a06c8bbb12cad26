#include "testing/gpt/flags/offload_flags.h"

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::Tier;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Returns the error, if any, and what the value of `text` is written as.
template <typename T>
std::pair<std::string, std::string> Parse(absl::string_view text) {
  T value;
  std::string error;
  const bool parsed = AbslParseFlag(text, &value, &error);
  EXPECT_EQ(parsed, error.empty()) << text;
  return {error, parsed ? AbslUnparseFlag(value) : ""};
}

TEST(OffloadTierTest, IsWhatItsNameSays) {
  for (const char* name : {"none", "cpu", "ssd"}) {
    EXPECT_THAT(Parse<OffloadTier>(name), Pair("", name));
  }
  for (const char* name : {"", "SSD", "device", "disk"}) {
    EXPECT_THAT(Parse<OffloadTier>(name),
                Pair("expected none, cpu or ssd", ""));
  }
}

TEST(OffloadKindsTest, AreAListInAnyOrder) {
  EXPECT_EQ(AbslUnparseFlag(OffloadKinds()), "parameters,gradients,optimizer");
  for (const char* text : {"parameters", "gradients,optimizer", "optimizer"}) {
    EXPECT_THAT(Parse<OffloadKinds>(text), Pair("", text));
  }
  EXPECT_THAT(Parse<OffloadKinds>("optimizer,parameters,optimizer"),
              Pair("", "parameters,optimizer"));
}

TEST(OffloadKindsTest, UnknownOnesAreNamed) {
  EXPECT_THAT(Parse<OffloadKinds>(""),
              Pair(HasSubstr("\"\" is none of parameters"), ""));
  EXPECT_THAT(Parse<OffloadKinds>("parameters,"),
              Pair(HasSubstr("\"\" is none of"), ""));
  EXPECT_THAT(Parse<OffloadKinds>("gradients,momenta"),
              Pair(HasSubstr("\"momenta\" is none of"), ""));
}

TEST(ByteCountTest, HasAUnitOrNone) {
  const std::vector<std::pair<std::string, int64_t>> counts = {
      {"0", 0},       {"1", 1},          {"4097", 4097},
      {"1KiB", 1024}, {"3MiB", 3 << 20}, {"8GiB", int64_t{8} << 30},
  };
  for (const auto& [text, bytes] : counts) {
    ByteCount count;
    std::string error;
    EXPECT_TRUE(AbslParseFlag(text, &count, &error)) << error;
    EXPECT_EQ(count.bytes, bytes);
    EXPECT_EQ(AbslUnparseFlag(count), text);
  }
  EXPECT_THAT(Parse<ByteCount>("2048KiB"), Pair("", "2MiB"));
  EXPECT_THAT(Parse<ByteCount>("0GiB"), Pair("", "0"));
  EXPECT_THAT(Parse<ByteCount>("9223372036854775807"),
              Pair("", "9223372036854775807"));
}

TEST(ByteCountTest, AllElseIsRefused) {
  for (const char* text :
       {"", "GiB", "8GB", "8gib", "1.5GiB", "-1", "-8GiB", "8 TiB", "many",
        "9223372036854775808", "8589934592GiB"}) {
    EXPECT_THAT(Parse<ByteCount>(text), Pair(HasSubstr("such as 8GiB"), ""))
        << text;
  }
}

TEST(ToOffloadOptionsTest, NothingIsOffloadedByDefault) {
  ASSERT_OK_AND_ASSIGN(const fsdp::OffloadOptions options,
                       ToOffloadOptions({}));
  EXPECT_FALSE(options.any());
}

TEST(ToOffloadOptionsTest, ChosenKindsGoToTheTier) {
  OffloadFlags flags;
  flags.tier.tier = Tier::kSsd;
  flags.kinds.chosen = {false, true, false};
  flags.directory = "/scratch";
  flags.memory_budget.bytes = 5;
  ASSERT_OK_AND_ASSIGN(const fsdp::OffloadOptions options,
                       ToOffloadOptions(flags));
  EXPECT_EQ(options.parameters, Tier::kDevice);
  EXPECT_EQ(options.gradients, Tier::kSsd);
  EXPECT_EQ(options.optimizer, Tier::kDevice);
  EXPECT_EQ(options.directory, "/scratch");
  EXPECT_EQ(options.memory_budget, 5);
}

TEST(ToOffloadOptionsTest, FilesAreTemporaryOnesUnlessToldOtherwise) {
  OffloadFlags flags;
  flags.tier.tier = Tier::kSsd;
  setenv("TMPDIR", ::testing::TempDir().c_str(), 1);
  ASSERT_OK_AND_ASSIGN(fsdp::OffloadOptions options, ToOffloadOptions(flags));
  EXPECT_EQ(options.directory, ::testing::TempDir());
  setenv("TMPDIR", "/no/such/directory", 1);
  ASSERT_OK_AND_ASSIGN(options, ToOffloadOptions(flags));
  EXPECT_EQ(options.directory, "/tmp");
}

TEST(ToOffloadOptionsTest, FlagsThatWouldDoNothingAreRefused) {
  OffloadFlags budget;
  budget.memory_budget.bytes = 3 << 20;
  EXPECT_THAT(
      ToOffloadOptions(budget),
      StatusIs(kInvalid, HasSubstr("--memory-budget=3MiB without --offload")));
  OffloadFlags kinds;
  kinds.kinds.chosen = {true, false, true};
  EXPECT_THAT(
      ToOffloadOptions(kinds),
      StatusIs(kInvalid, HasSubstr("--offload-kinds=parameters,optimizer "
                                   "without --offload")));
  OffloadFlags directory;
  directory.directory = "/scratch";
  EXPECT_THAT(ToOffloadOptions(directory),
              StatusIs(kInvalid, HasSubstr("--offload-dir=/scratch without")));
}

}  // namespace
}  // namespace gpt
