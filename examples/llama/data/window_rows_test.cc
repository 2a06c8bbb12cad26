#include "examples/llama/data/window_rows.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/testing/written_tokens.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Values {
  std::vector<int64_t> tokens;
  std::vector<int64_t> targets;
};

absl::StatusOr<Values> Read(const RowSource& source, int64_t index) {
  const auto seq = static_cast<size_t>(source.seq());
  // A value that nobody writes is neither a token nor a target.
  Values values = {std::vector<int64_t>(seq, -1),
                   std::vector<int64_t>(seq, -1)};
  Row row = {absl::MakeSpan(values.tokens), absl::MakeSpan(values.targets), {}};
  const absl::Status status = source.Read(index, row);
  if (!status.ok()) return status;
  EXPECT_THAT(row.documents, IsEmpty());
  return values;
}

// Token i is 100 + i.
absl::StatusOr<TokenFile> Counting(int64_t num_tokens) {
  std::vector<int64_t> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), 100);
  return TokenFile::Open(WriteTokens("counting", {tokens, {}}));
}

// Reads row after row, token after token.
void ExpectRows(const RowSource& source, int64_t num_tokens, bool padded) {
  int64_t next = 0;
  for (int64_t i = 0; i < source.num_rows(); ++i) {
    ASSERT_OK_AND_ASSIGN(const Values row, Read(source, i));
    for (int64_t k = 0; k < source.seq(); ++k) {
      const bool is_there = next + 1 < num_tokens;
      EXPECT_TRUE(is_there || (padded && i + 1 == source.num_rows() && k > 0));
      EXPECT_EQ(row.tokens[k], is_there ? 100 + next : kPadding);
      EXPECT_EQ(row.targets[k], is_there ? 101 + next : kNoTarget);
      ++next;
    }
  }
  const int64_t left = num_tokens - 1 - next;
  EXPECT_LT(left, padded ? 1 : source.seq());
}

TEST(WindowRowsTest, AreOneAfterTheOther) {
  for (int64_t num_tokens = 2; num_tokens <= 40; ++num_tokens) {
    ASSERT_OK_AND_ASSIGN(const TokenFile file, Counting(num_tokens));
    for (int64_t seq : {1, 2, 3, 7, 16, 39}) {
      ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const WindowRows> all,
                           WindowRows::Create(file, seq, LastWindow::kPadded));
      EXPECT_EQ(all->seq(), seq);
      ExpectRows(*all, num_tokens, /*padded=*/true);
      const auto whole = WindowRows::Create(file, seq, LastWindow::kLeftOut);
      EXPECT_EQ(whole.ok(), num_tokens > seq) << num_tokens << " " << seq;
      if (whole.ok()) ExpectRows(**whole, num_tokens, /*padded=*/false);
    }
  }
}

TEST(WindowRowsTest, TooFewTokensAreNone) {
  for (int64_t num_tokens : {0, 1}) {
    ASSERT_OK_AND_ASSIGN(const TokenFile file, Counting(num_tokens));
    for (LastWindow last : {LastWindow::kLeftOut, LastWindow::kPadded}) {
      EXPECT_THAT(
          WindowRows::Create(file, 8, last),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   AllOf(HasSubstr(file.path()),
                         HasSubstr(absl::StrCat("there are ", num_tokens)))));
    }
  }
}

TEST(WindowRowsTest, RowsHaveTokens) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Counting(5));
  EXPECT_THAT(WindowRows::Create(file, 0, LastWindow::kPadded),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rows of 0 tokens")));
}

TEST(WindowRowsTest, DamageIsSaidWhereItIs) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(WriteTokens(
                           "damaged", {{1, 2, 3, 9, 1, 2, 3}, {}, 2, 9})));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const WindowRows> rows,
                       WindowRows::Create(file, 2, LastWindow::kLeftOut));
  EXPECT_OK(Read(*rows, 0));
  EXPECT_THAT(Read(*rows, 1), StatusIs(absl::StatusCode::kDataLoss,
                                       HasSubstr("number 3 is 9")));
  EXPECT_OK(Read(*rows, 2));
  // The token is now only a target.
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const WindowRows> longer,
                       WindowRows::Create(file, 3, LastWindow::kLeftOut));
  EXPECT_THAT(Read(*longer, 0), StatusIs(absl::StatusCode::kDataLoss,
                                         HasSubstr("number 3 is 9")));
}

}  // namespace
}  // namespace llama
