// Reads what tools/tokenize_text.py has written.

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::testing::SizeIs;

constexpr absl::string_view kFolder = "examples/llama/data/samples/";

std::string PathOf(absl::string_view name) {
  return absl::StrCat(kFolder, name);
}

fsdp::Json ParseJson(absl::string_view text) {
  return fsdp::Json::Parse(text).value();
}

// Returns the texts of text.jsonl, without the empty one.
std::vector<std::string> Texts() {
  std::vector<std::string> texts;
  std::ifstream file(PathOf("text.jsonl"));
  for (std::string line; std::getline(file, line);) {
    texts.push_back(*ParseJson(line).Find("text")->As<std::string>());
    if (texts.back().empty()) texts.pop_back();
  }
  return texts;
}

std::vector<std::vector<int64_t>> Documents(const TokenFile& file) {
  std::vector<std::vector<int64_t>> documents;
  for (int64_t i = 0; i < file.num_documents(); ++i) {
    const TokenRange range = file.Document(i).value();
    documents.emplace_back(range.size());
    EXPECT_OK(file.Read(range.begin, absl::MakeSpan(documents.back())));
  }
  return documents;
}

// Returns the byte that each character of a byte-level vocabulary stands for.
// Bytes that print stand for themselves; the others are, in order, the
// characters from 256 on.
std::map<std::string, char> BytesOfCharacters() {
  std::map<std::string, char> bytes;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool prints =
        (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = prints ? byte : next++;
    const std::string utf8 =
        code < 128 ? std::string(1, static_cast<char>(code))
                   : std::string{static_cast<char>(0xC0 | code >> 6),
                                 static_cast<char>(0x80 | (code & 0x3F))};
    bytes[utf8] = static_cast<char>(byte);
  }
  return bytes;
}

// Returns the vocabulary by token.
std::map<int64_t, std::string> Vocabulary() {
  std::ifstream file(PathOf("tokenizer.json"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const fsdp::Json json = ParseJson(text);
  const std::map<std::string, char> bytes = BytesOfCharacters();
  std::map<int64_t, std::string> vocabulary;
  for (const auto& [word, id] :
       *json.Find("model")->Find("vocab")->As<fsdp::Json::Object>()) {
    std::string& out = vocabulary[*id.As<int64_t>()];
    for (size_t i = 0; i < word.size();) {
      const size_t size = static_cast<unsigned char>(word[i]) < 128 ? 1 : 2;
      out.push_back(bytes.at(word.substr(i, size)));
      i += size;
    }
  }
  return vocabulary;
}

TEST(SamplesTest, BytesAreTheText) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bytes.bin")));
  EXPECT_EQ(file.description().token_bytes, 4);
  EXPECT_EQ(file.description().vocab_size, 256);
  EXPECT_EQ(file.description().tokenizer_sha256, "");
  std::vector<std::string> texts;
  for (const std::vector<int64_t>& tokens : Documents(file)) {
    texts.emplace_back(tokens.begin(), tokens.end());
  }
  ASSERT_THAT(texts, SizeIs(5));
  EXPECT_EQ(texts, Texts());
}

TEST(SamplesTest, TokensAreTheText) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file,
                       TokenFile::Open(PathOf("bpe.bin")));
  EXPECT_EQ(file.description().token_bytes, 2);
  EXPECT_EQ(file.description().vocab_size, 290);
  EXPECT_EQ(file.description().bos_id, 0);
  EXPECT_EQ(file.description().eos_id, 1);
  const std::map<int64_t, std::string> vocabulary = Vocabulary();
  std::vector<std::string> texts;
  for (const std::vector<int64_t>& tokens : Documents(file)) {
    EXPECT_EQ(tokens.front(), 0);
    EXPECT_EQ(tokens.back(), 1);
    std::string& text = texts.emplace_back();
    for (int64_t token : absl::MakeSpan(tokens).subspan(1, tokens.size() - 2)) {
      text += vocabulary.at(token);
    }
  }
  EXPECT_EQ(texts, Texts());
}

}  // namespace
}  // namespace llama
