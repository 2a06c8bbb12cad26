#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/testing/written_tokens.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using RowsPtr = std::shared_ptr<const RowSource>;

struct Values {
  std::vector<int64_t> tokens;
  std::vector<int64_t> targets;
  std::vector<int64_t> documents;
};

absl::StatusOr<Values> Read(const RowSource& source, int64_t index) {
  const auto seq = static_cast<size_t>(source.seq());
  // A value that nobody writes is neither a token nor a target.
  Values values = {
      std::vector<int64_t>(seq, -1), std::vector<int64_t>(seq, -1), {}};
  Row row = {absl::MakeSpan(values.tokens), absl::MakeSpan(values.targets), {}};
  const absl::Status status = source.Read(index, row);
  if (!status.ok()) return status;
  values.documents = row.documents;
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
    EXPECT_THAT(row.documents, ::testing::IsEmpty());
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
      ASSERT_OK_AND_ASSIGN(const RowsPtr all,
                           WindowRows(file, seq, LastWindow::kPadded));
      EXPECT_EQ(all->seq(), seq);
      ExpectRows(*all, num_tokens, /*padded=*/true);
      const auto whole = WindowRows(file, seq, LastWindow::kLeftOut);
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
          WindowRows(file, 8, last),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   AllOf(HasSubstr(file.path()),
                         HasSubstr(absl::StrCat("there are ", num_tokens)))));
    }
  }
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Counting(5));
  EXPECT_THAT(WindowRows(file, 0, LastWindow::kPadded),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rows of 0 tokens")));
}

TEST(WindowRowsTest, DamageIsSaidWhereItIs) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(WriteTokens(
                           "damaged", {{1, 2, 3, 9, 1, 2, 3}, {}, 2, 9})));
  ASSERT_OK_AND_ASSIGN(const RowsPtr rows,
                       WindowRows(file, 2, LastWindow::kLeftOut));
  EXPECT_OK(Read(*rows, 0));
  EXPECT_THAT(Read(*rows, 1), StatusIs(absl::StatusCode::kDataLoss,
                                       HasSubstr("number 3 is 9")));
  EXPECT_OK(Read(*rows, 2));
  // The token is now only a target.
  ASSERT_OK_AND_ASSIGN(const RowsPtr longer,
                       WindowRows(file, 3, LastWindow::kLeftOut));
  EXPECT_THAT(Read(*longer, 0), StatusIs(absl::StatusCode::kDataLoss,
                                         HasSubstr("number 3 is 9")));
}

TEST(WindowRowsTest, AreNotOfTokensOfWhichSomeAreNotLearned) {
  WrittenTokens written = {{1, 2, 3}, {0}};
  written.mask = "\1\1\1";
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(WriteTokens("masked", written)));
  EXPECT_THAT(WindowRows(file, 1, LastWindow::kPadded),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("take --rows=packed")));
}

// Has documents of these lengths; token i of the file is i + 1.
absl::StatusOr<TokenFile> Documents(const std::vector<int64_t>& lengths,
                                    const std::string& mask = "") {
  WrittenTokens written = {{}, {}, 4, int64_t{1} << 32, mask};
  for (const int64_t length : lengths) {
    written.begins.push_back(written.tokens.size());
    for (int64_t i = 0; i < length; ++i) {
      written.tokens.push_back(written.tokens.size() + 1);
    }
  }
  return TokenFile::Open(WriteTokens("text", written));
}

// Packs by the definition: documents in the order of the seed, longer ones in
// pieces of a row and the rest, without those of which nothing is learned; a
// piece that does not fit begins a row.
std::vector<Values> Packed(const std::vector<int64_t>& lengths, int64_t seq,
                           uint64_t seed, const std::string& mask) {
  const auto count = static_cast<int64_t>(lengths.size());
  std::vector<Values> rows;
  int64_t used = seq;
  for (int64_t place = 0; place < count; ++place) {
    const int64_t document = Permuted(place, count, seed);
    const int64_t begin = std::accumulate(
        lengths.begin(), lengths.begin() + document, int64_t{1});
    const int64_t end = begin + lengths[document];
    for (int64_t token = begin; token < end;) {
      const int64_t size = std::min(seq, end - token);
      std::vector<int64_t> targets(size, kNoTarget);
      for (int64_t i = 0; i < size && token + i + 1 < end; ++i) {
        if (mask.empty() || mask[token + i] != 0) targets[i] = token + i + 1;
      }
      if (std::count(targets.begin(), targets.end(), kNoTarget) == size) {
        token += size;
        continue;
      }
      if (used + size > seq) {
        rows.push_back({std::vector<int64_t>(seq, kPadding),
                        std::vector<int64_t>(seq, kNoTarget),
                        {}});
        used = 0;
      }
      rows.back().documents.push_back(used);
      for (int64_t i = 0; i < size; ++i, ++token, ++used) {
        rows.back().tokens[used] = token;
        rows.back().targets[used] = targets[i];
      }
    }
  }
  return rows;
}

std::vector<std::vector<int64_t>> RandomLengths(int64_t seq) {
  std::vector<std::vector<int64_t>> texts = {
      {2}, {seq + 1}, {1, 2}, {seq, seq, 2, seq}, {3 * seq + 1, 1, 2 * seq, 2}};
  std::mt19937 random(seq);
  for (int64_t count : {7, 30, 101}) {
    std::vector<int64_t>& lengths = texts.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      lengths.push_back(1 + random() % (random() % 4 == 0 ? 3 * seq + 2 : seq));
    }
    lengths.push_back(2);
  }
  return texts;
}

void ExpectPacked(const std::vector<int64_t>& lengths, int64_t seq,
                  const std::string& mask) {
  const std::vector<Values> expected = Packed(lengths, seq, /*seed=*/3, mask);
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Documents(lengths, mask));
  const auto rows = PackedRows(file, seq, /*seed=*/3);
  ASSERT_EQ(rows.ok(), !expected.empty()) << rows.status();
  if (!rows.ok()) return;
  ASSERT_EQ((*rows)->num_rows(), expected.size());
  for (int64_t i = 0; i < (*rows)->num_rows(); ++i) {
    ASSERT_OK_AND_ASSIGN(const Values row, Read(**rows, i));
    EXPECT_EQ(row.tokens, expected[i].tokens);
    EXPECT_EQ(row.targets, expected[i].targets);
    EXPECT_EQ(row.documents, expected[i].documents);
  }
}

TEST(PackedRowsTest, HaveAllDocumentsAsGreedilyAsTheyCome) {
  std::mt19937 random(5);
  for (int64_t seq : {1, 2, 3, 8, 31}) {
    for (const std::vector<int64_t>& lengths : RandomLengths(seq)) {
      ExpectPacked(lengths, seq, "");
      // The first tokens of each are a prompt, perhaps all of them.
      std::string mask;
      for (const int64_t length : lengths) {
        const auto prompt = static_cast<int64_t>(random() % (length + 1));
        mask.append(prompt, '\0').append(length - prompt, '\1');
      }
      ExpectPacked(lengths, seq, mask);
    }
  }
}

TEST(PackedRowsTest, TheSeedShuffles) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       Documents(std::vector<int64_t>(50, 4)));
  const auto first_tokens = [&file](uint64_t seed) {
    const RowsPtr rows = PackedRows(file, 4, seed).value();
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < rows->num_rows(); ++i) {
      tokens.push_back(Read(*rows, i)->tokens[0]);
    }
    return tokens;
  };
  EXPECT_EQ(first_tokens(1), first_tokens(1));
  EXPECT_NE(first_tokens(1), first_tokens(2));
  EXPECT_FALSE(absl::c_is_sorted(first_tokens(1)));
}

TEST(PackedRowsTest, WithoutAnythingToPredictThereAreNone) {
  ASSERT_OK_AND_ASSIGN(const TokenFile single, Documents({1, 1, 1}));
  EXPECT_THAT(PackedRows(single, 4, 1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(single.path()),
                             HasSubstr("no document has two tokens"))));
  ASSERT_OK_AND_ASSIGN(const TokenFile none,
                       TokenFile::Open(WriteTokens("none", {})));
  EXPECT_THAT(PackedRows(none, 4, 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("")));
  ASSERT_OK_AND_ASSIGN(const TokenFile good, Documents({2}));
  EXPECT_THAT(PackedRows(good, 0, 1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rows of 0 tokens")));
}

TEST(PackedRowsTest, DamageIsFound) {
  ASSERT_OK_AND_ASSIGN(
      const TokenFile index,
      TokenFile::Open(WriteTokens("index", {{1, 2, 3, 4}, {0, 3, 2}})));
  EXPECT_THAT(PackedRows(index, 4, 1),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("document 1")));
  // The wrong token is read as a token and, where a document was cut, as the
  // target of a piece.
  ASSERT_OK_AND_ASSIGN(
      const TokenFile tokens,
      TokenFile::Open(WriteTokens("tokens", {{1, 2, 3, 9, 5}, {0}, 2, 9})));
  ASSERT_OK_AND_ASSIGN(const RowsPtr rows, PackedRows(tokens, 3, 1));
  for (int64_t i : {0, 1}) {
    EXPECT_THAT(Read(*rows, i), StatusIs(absl::StatusCode::kDataLoss,
                                         HasSubstr("number 3 is 9")));
  }
}

std::vector<int64_t> All(int64_t size, uint64_t seed) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(Permuted(i, size, seed));
  return values;
}

TEST(PermutedTest, HasEachValueOnce) {
  std::vector<int64_t> sizes = {255, 256, 257, 1021, 4095, 4096, 4097, 10007};
  for (int64_t size = 1; size <= 70; ++size) sizes.push_back(size);
  for (int64_t size : sizes) {
    for (uint64_t seed : {0, 1, 99}) {
      const std::vector<int64_t> values = All(size, seed);
      const std::set<int64_t> distinct(values.begin(), values.end());
      EXPECT_EQ(distinct.size(), size);
      EXPECT_EQ(*distinct.begin(), 0);
      EXPECT_EQ(*distinct.rbegin(), size - 1);
    }
  }
}

// Another program computed these, with which earlier checkpoints go on.
TEST(PermutedTest, IsWhatItHasAlwaysBeen) {
  EXPECT_THAT(All(11, 42), ElementsAre(10, 0, 6, 5, 4, 2, 7, 3, 1, 9, 8));
  constexpr int64_t kLarge = 1000000000000, kLargest = int64_t{1} << 62;
  EXPECT_EQ(Permuted(0, kLarge, 1), 99093225364);
  EXPECT_EQ(Permuted(1, kLarge, 1), 91979019719);
  EXPECT_EQ(Permuted(kLarge - 1, kLarge, 1), 988403898570);
  EXPECT_EQ(Permuted(0, kLargest, 7), 1092590721977327156);
  EXPECT_EQ(Permuted(1, kLargest, 7), 2720665911475575978);
  EXPECT_EQ(Permuted(kLargest - 1, kLargest, 7), 3426793995687316288);
  EXPECT_EQ(MixSeeds(0, 0), 0x48218226ff3cd4bf);
  EXPECT_EQ(MixSeeds(1, 2), 0x81a5c1377856b73);
}

}  // namespace
}  // namespace llama
