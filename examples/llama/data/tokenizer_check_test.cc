#include "examples/llama/data/tokenizer_check.h"

#include <string>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string PathOf(absl::string_view name) {
  return absl::StrCat("examples/llama/data/samples/", name);
}

TEST(TokenizerCheckTest, TakesTheTokenizerThatHasMadeTheTokens) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bpe.bin")));
  EXPECT_OK(CheckTokenizer(file, PathOf("tokenizer.json")));
}

TEST(TokenizerCheckTest, RefusesAnother) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bpe.bin")));
  EXPECT_THAT(CheckTokenizer(file, PathOf("tokenizer_config.json")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(PathOf("bpe.bin")),
                             HasSubstr("another tokenizer's"),
                             HasSubstr(PathOf("tokenizer_config.json")))));
}

TEST(TokenizerCheckTest, BytesAreNoTokenizers) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bytes.bin")));
  EXPECT_THAT(CheckTokenizer(file, PathOf("tokenizer.json")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("they are bytes")));
}

TEST(TokenizerCheckTest, ATokenizerThatIsMissingIsNotFound) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bpe.bin")));
  EXPECT_THAT(CheckTokenizer(file, PathOf("none.json")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.json")));
}

}  // namespace
}  // namespace llama
