#include "examples/llama/data/token_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/testing/written_tokens.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<std::vector<int64_t>> Read(const TokenFile& file, int64_t begin,
                                          int64_t count) {
  std::vector<int64_t> tokens(count);
  const absl::Status status = file.Read(begin, absl::MakeSpan(tokens));
  if (!status.ok()) return status;
  return tokens;
}

TokenFile Written(absl::string_view name, const WrittenTokens& tokens) {
  return TokenFile::Open(WriteTokens(name, tokens)).value();
}

std::vector<int64_t> All(const TokenFile& file) {
  return Read(file, 0, file.num_tokens()).value();
}

TEST(TokenFileTest, ReadsTokensOfBothSizes) {
  const std::vector<int64_t> small = {0, 1, 255, 256, 65535};
  EXPECT_EQ(All(Written("narrow", {small, {}, 2, 65536})), small);
  const std::vector<int64_t> large = {65536, 0, 0x12345678, 0xFFFFFFFF};
  const TokenFile wide = Written("wide", {large, {}, 4, int64_t{1} << 32});
  EXPECT_EQ(All(wide), large);
  EXPECT_THAT(Read(wide, 1, 2).value(), ElementsAre(0, 0x12345678));
  EXPECT_THAT(Read(wide, 4, 0).value(), ElementsAre());
  EXPECT_THAT(All(Written("none", {})), ElementsAre());
}

TEST(TokenFileTest, TokensThatAreNotLearnedAreNoTargets) {
  WrittenTokens written = {{5, 6, 7, 8}};
  std::vector<int64_t> targets(3);
  ASSERT_OK(Written("all", written).ReadTargets(1, absl::MakeSpan(targets)));
  EXPECT_THAT(targets, ElementsAre(6, 7, 8));
  written.mask = std::string("\1\0\1\0", 4);
  const TokenFile file = Written("masked", written);
  ASSERT_OK(file.ReadTargets(1, absl::MakeSpan(targets)));
  EXPECT_THAT(targets, ElementsAre(kNoTarget, 7, kNoTarget));
  EXPECT_THAT(All(file), ElementsAre(5, 6, 7, 8));
  EXPECT_TRUE(*file.IsLearned({1, 3}));
  EXPECT_FALSE(*file.IsLearned({1, 2}));
  EXPECT_FALSE(*file.IsLearned({3, 4}));
}

TEST(TokenFileTest, ATokenThatTheVocabularyLacksIsNamed) {
  const TokenFile file = Written("foreign", {{5, 9, 10, 3}, {}, 2, 10});
  EXPECT_OK(Read(file, 0, 2));
  EXPECT_OK(Read(file, 3, 1));
  EXPECT_THAT(Read(file, 1, 3), StatusIs(absl::StatusCode::kDataLoss,
                                         AllOf(HasSubstr(file.path()),
                                               HasSubstr("number 2 is 10"))));
}

TEST(TokenFileTest, AnyFileIsBytes) {
  WriteFile(PathFor("text"), "ab\xFF");
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::OpenBytes(PathFor("text")));
  EXPECT_THAT(All(file), ElementsAre('a', 'b', 255));
  EXPECT_EQ(file.description().vocab_size, 256);
  EXPECT_EQ(file.description().num_tokens, 3);
  ASSERT_EQ(file.num_documents(), 1);
  EXPECT_EQ(file.Document(0)->begin, 0);
  EXPECT_EQ(file.Document(0)->end, 3);
}

TEST(TokenFileTest, NothingIsReadOutsideOfIt) {
  const TokenFile file = Written("limits", {{10, 11, 12}, {0, 2}});
  EXPECT_DEATH((void)Read(file, -1, 1), "broken invariant");
  EXPECT_DEATH((void)Read(file, 2, 2), "broken invariant");
  EXPECT_DEATH((void)Read(file, 4, 0), "broken invariant");
  EXPECT_DEATH((void)file.Document(-1), "broken invariant");
  EXPECT_DEATH((void)file.Document(2), "broken invariant");
}

TEST(TokenFileTest, KnowsItsDocuments) {
  const TokenFile file = Written("documents", {{1, 2, 3, 4}, {0, 1, 3}});
  ASSERT_EQ(file.num_documents(), 3);
  const std::vector<int64_t> begins = {0, 1, 3, 4};
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(const TokenRange range, file.Document(i));
    EXPECT_EQ(range.begin, begins[i]);
    EXPECT_EQ(range.end, begins[i + 1]);
  }
  const TokenFile without = Written("unknown", {{1, 2, 3}, {}});
  ASSERT_EQ(without.num_documents(), 1);
  EXPECT_EQ(without.Document(0)->size(), 3);
}

// Of three documents, those in `damaged` are refused when the second begins
// where it says.
void ExpectDamaged(const std::string& name, std::vector<int64_t> begins,
                   std::vector<int> damaged) {
  ASSERT_OK_AND_ASSIGN(
      const TokenFile file,
      TokenFile::Open(WriteTokens(name, {{1, 2, 3, 4}, std::move(begins)})));
  for (int i = 0; i < file.num_documents(); ++i) {
    const bool is_damaged = std::count(damaged.begin(), damaged.end(), i) > 0;
    EXPECT_EQ(!file.Document(i).ok(), is_damaged) << name << " " << i;
    if (is_damaged) {
      EXPECT_THAT(file.Document(i),
                  StatusIs(absl::StatusCode::kDataLoss,
                           HasSubstr(absl::StrCat("document ", i, " "))));
    }
  }
}

TEST(TokenFileTest, AnIndexThatIsOutOfOrderIsDamaged) {
  ExpectDamaged("begins_late", {1, 2, 3}, {0});
  ExpectDamaged("empty_document", {0, 2, 2}, {1});
  ExpectDamaged("backwards", {0, 3, 2}, {1});
  ExpectDamaged("at_the_end", {0, 1, 4}, {1, 2});
  // As a signed number it would be less than the rest.
  WrittenTokens written = {{1, 2, 3, 4}, {0, 1, 3}};
  const std::string path = WriteTokens("huge", written);
  WriteFile(PathFor("huge.idx"),
            LittleEndian({0, 1}, 8) + std::string(8, '\xFF'));
  ASSERT_OK_AND_ASSIGN(const TokenFile file, TokenFile::Open(path));
  EXPECT_OK(file.Document(0));
  EXPECT_FALSE(file.Document(1).ok());
  EXPECT_FALSE(file.Document(2).ok());
}

TEST(TokenFileTest, OnlyNamesOfTheFormatAreTaken) {
  WriteFile(PathFor("book.txt"), "text");
  EXPECT_THAT(TokenFile::Open(PathFor("book.txt")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(PathFor("book.txt")),
                             HasSubstr("tools/tokenize_text.py"))));
}

TEST(TokenFileTest, WhatIsMissingIsNamed) {
  for (const std::string kind : {"bin", "json", "idx", "mask"}) {
    const std::string path =
        WriteTokens("missing", {{1, 2}, {0}, 2, 3, "\1\1"});
    std::remove(PathFor("missing." + kind).c_str());
    EXPECT_THAT(TokenFile::Open(path),
                StatusIs(absl::StatusCode::kNotFound,
                         HasSubstr(PathFor("missing." + kind))));
  }
  WriteFile(PathFor("alone.bin"), "ab");
  EXPECT_THAT(TokenFile::Open(PathFor("alone.bin")),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("tools/tokenize_text.py makes")));
}

TEST(TokenFileTest, SizesHaveToBeThoseOfTheDescription) {
  const WrittenTokens written = {{1, 2, 3}, {0, 2}};
  const std::string tokens = LittleEndian(written.tokens, 2);
  const std::string begins = LittleEndian(written.begins, 8);
  for (const std::string& bytes :
       {tokens.substr(0, 5), tokens.substr(0, 4), tokens + "a"}) {
    const std::string path = WriteTokens("sizes", written);
    WriteFile(path, bytes);
    EXPECT_THAT(TokenFile::Open(path),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(path),
                               HasSubstr(absl::StrCat(bytes.size(), " bytes")),
                               HasSubstr("3 times 2"))));
  }
  for (const std::string& bytes : {begins.substr(0, 15), begins + begins}) {
    const std::string path = WriteTokens("sizes", written);
    WriteFile(PathFor("sizes.idx"), bytes);
    EXPECT_THAT(TokenFile::Open(path),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(PathFor("sizes.idx")),
                               HasSubstr("2 times 8"))));
  }
  EXPECT_THAT(
      TokenFile::Open(WriteTokens("sizes", {{1, 2, 3}, {0}, 2, 4, "\1\1"})),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr("sizes.mask"), HasSubstr("3 times 1"))));
}

TEST(TokenFileTest, ADescriptionThatIsNoneOrTooLargeIsNamed) {
  const std::string path = WriteTokens("undescribed", {{1, 2}});
  std::ofstream(PathFor("undescribed.json"), std::ios::app)
      << std::string(1 << 20, ' ');
  for (const std::string why : {"undescribed.json: it is too large", "json"}) {
    EXPECT_THAT(TokenFile::Open(path),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
    WriteFile(PathFor("undescribed.json"), "[1]");
  }
}

std::string Digits() { return std::string(63, '0') + "f"; }

std::string Good() {
  return absl::StrCat(
      R"({"format": "fsdp-tokens", "version": 1, "dtype": "uint16",
          "num_tokens": 7, "num_documents": 2, "vocab_size": 300,
          "bos_id": null, "eos_id": 299, "later": [1],
          "tokenizer_sha256": ")",
      Digits(), "\"}");
}

// Returns the text with `to` in place of `from`, which is there once.
std::string With(const std::string& from, const std::string& to) {
  std::string text = Good();
  EXPECT_EQ(absl::StrReplaceAll({{from, to}}, &text), 1) << from;
  return text;
}

TEST(TokenDescriptionTest, ReadsWhatIsThere) {
  ASSERT_OK_AND_ASSIGN(const TokenDescription description,
                       ParseTokenDescription(Good()));
  EXPECT_EQ(description.token_bytes, 2);
  EXPECT_EQ(description.num_tokens, 7);
  EXPECT_EQ(description.num_documents, 2);
  EXPECT_EQ(description.vocab_size, 300);
  EXPECT_EQ(description.tokenizer_sha256, Digits());
  EXPECT_EQ(ParseTokenDescription(With("uint16", "uint32"))->token_bytes, 4);
  EXPECT_OK(ParseTokenDescription(With("\"bos_id\": null", "\"bos_id\": 0")));
  EXPECT_OK(ParseTokenDescription(With("299", "null")));
  EXPECT_EQ(ParseTokenDescription(With('"' + Digits() + '"', "null"))
                ->tokenizer_sha256,
            "");
}

TEST(TokenDescriptionTest, NamesTheKeyThatIsWrong) {
  const struct {
    std::string key, from, to;  // the key is empty if nothing is wrong
  } cases[] = {
      {"format", "fsdp-tokens", "numpy"},
      {"format", "\"fsdp-tokens\"", "1"},
      {"version", "\"version\": 1", "\"version\": 0"},
      {"version", "\"version\": 1", "\"version\": \"1\""},
      {"dtype", "uint16", "uint8"},
      {"num_tokens", "7", "-1"},
      {"num_tokens", "7", "7.0"},
      {"num_tokens", "7", "9223372036854775807"},
      {"", "documents\": 2", "documents\": 7"},
      {"num_documents", "documents\": 2", "documents\": 8"},
      {"num_documents", "documents\": 2", "documents\": -1"},
      {"vocab_size", "300", "0"},
      {"", "300", "65536"},
      {"vocab_size", "300", "65537"},
      {"bos_id", "\"bos_id\": null", "\"bos_id\": -1"},
      {"eos_id", "299", "300"},
      {"mask", "\"later\"", "\"mask\""},
      {"tokenizer_sha256", "0f", "0F"},
      {"tokenizer_sha256", "0f", "0g"},
      {"tokenizer_sha256", "0f", "0"},
  };
  for (const auto& c : cases) {
    const auto description = ParseTokenDescription(With(c.from, c.to));
    if (c.key.empty()) {
      EXPECT_OK(description) << c.to;
      continue;
    }
    EXPECT_THAT(description, StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr('"' + c.key + '"')))
        << c.to;
  }
  for (const auto& [size, is_right] :
       {std::pair("4294967296", true), {"4294967297", false}}) {
    const std::string wide =
        absl::StrReplaceAll(Good(), {{"uint16", "uint32"}, {"300", size}});
    EXPECT_EQ(ParseTokenDescription(wide).ok(), is_right) << size;
  }
  for (const std::string key :
       {"format", "version", "dtype", "num_tokens", "num_documents",
        "vocab_size", "bos_id", "eos_id", "tokenizer_sha256"}) {
    EXPECT_THAT(ParseTokenDescription(With('"' + key + '"', '"' + key + "_\"")),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(key)));
  }
}

TEST(TokenDescriptionTest, ALaterVersionIsNotRead) {
  EXPECT_THAT(
      ParseTokenDescription(With("\"version\": 1", "\"version\": 3")),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("version 3")));
}

TEST(TokenFileTest, OnlyRegularFilesAreRead) {
  ASSERT_EQ(mkfifo(PathFor("fifo").c_str(), 0600), 0);
  for (const std::string& path : {PathFor("fifo"), PathFor(".")}) {
    EXPECT_THAT(TokenFile::OpenBytes(path),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(path)));
  }
}

// What tools/tokenize_text.py has written.
std::string Sample(absl::string_view name) {
  return absl::StrCat("examples/llama/data/samples/", name);
}

std::vector<std::vector<int64_t>> Documents(const TokenFile& file) {
  std::vector<std::vector<int64_t>> documents;
  for (int64_t i = 0; i < file.num_documents(); ++i) {
    const TokenRange range = file.Document(i).value();
    documents.push_back(Read(file, range.begin, range.size()).value());
  }
  return documents;
}

TEST(SamplesTest, BytesAreTheText) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(Sample("bytes.bin")));
  EXPECT_EQ(file.description().token_bytes, 4);
  EXPECT_EQ(file.description().vocab_size, 256);
  EXPECT_EQ(file.description().tokenizer_sha256, "");
  const std::vector<std::vector<int64_t>> documents = Documents(file);
  ASSERT_EQ(documents.size(), 5);
  EXPECT_EQ(std::string(documents[0].begin(), documents[0].end()),
            "The quick brown fox jumps over the lazy dog.");
  EXPECT_THAT(documents[2], ElementsAre('a'));
}

TEST(SamplesTest, DocumentsBeginAndEndWithTheirTokens) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(Sample("bpe.bin")));
  EXPECT_EQ(file.description().token_bytes, 2);
  EXPECT_EQ(file.description().vocab_size, 290);
  EXPECT_EQ(file.num_documents(), 5);
  for (const std::vector<int64_t>& tokens : Documents(file)) {
    EXPECT_EQ(tokens.front(), 0);
    EXPECT_EQ(tokens.back(), 1);
  }
}

TEST(TokenizerCheckTest, TakesTheTokenizerThatHasMadeTheTokens) {
  ASSERT_OK_AND_ASSIGN(const TokenFile bpe, TokenFile::Open(Sample("bpe.bin")));
  ASSERT_OK_AND_ASSIGN(const TokenFile bytes,
                       TokenFile::Open(Sample("bytes.bin")));
  EXPECT_OK(CheckTokenizer(bpe, Sample("tokenizer.json")));
  EXPECT_THAT(CheckTokenizer(bpe, Sample("tokenizer_config.json")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(Sample("bpe.bin")),
                             HasSubstr("another tokenizer's"),
                             HasSubstr(Sample("tokenizer_config.json")))));
  EXPECT_THAT(CheckTokenizer(bytes, Sample("tokenizer.json")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("they are bytes")));
  EXPECT_THAT(CheckTokenizer(bpe, Sample("none.json")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.json")));
}

}  // namespace
}  // namespace llama
