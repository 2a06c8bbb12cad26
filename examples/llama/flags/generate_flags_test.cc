#include "examples/llama/flags/generate_flags.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/testing/parsed_flags.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::StatusOr<GenerateFlags> Parse(const std::string& flags) {
  return fsdp::testing::ParsedBy(ReadGenerateFlags, "generate " + flags);
}

TEST(GenerateFlagsTest, SaysWhatCannotBe) {
  EXPECT_OK(Parse("--model=m --prompt=p"));
  const std::pair<const char*, const char*> cases[] = {
      {"--prompt=p", "--model=DIR"},
      {"--model=m", "--prompt=TEXT"},
      {"--model=m --prompt=p --tokens=1", "either"},
      {"--model=m --prompt=p --batch", "add --tokens=-"},
      {"--max_tokens=0", "--max_tokens=0: take at least 1"},
      {"--threads=-1", "--threads=-1: take at least 0"},
      {"--model=m --prompt=p --temperature=-1", "--temperature=-1"},
      {"--model=m --prompt=p --temperature=inf", "--temperature=inf"},
      {"--model=m --prompt=p --top_k=-1", "--top_k=-1"},
      {"--model=m --prompt=p --top_p=0", "--top_p=0"},
      {"--model=m --prompt=p --top_p=1.5", "--top_p=1.5"},
      {"--model=m --prompt=p --top_p=nan", "--top_p=nan"}};
  for (const auto& [flags, text] : cases) {
    EXPECT_THAT(Parse(flags),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
}

}  // namespace
}  // namespace llama
