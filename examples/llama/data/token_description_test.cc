#include <string>

#include "absl/strings/str_replace.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

std::string Digits() { return std::string(63, '0') + "f"; }

std::string Good() {
  return absl::StrCat(
      R"({"format": "fsdp-tokens", "version": 1, "dtype": "uint16",
          "num_tokens": 7, "num_documents": 2, "vocab_size": 300,
          "bos_id": null, "eos_id": 299, "later": [1],
          "tokenizer_sha256": ")",
      Digits(), "\"}");
}

// What is there in place of `from`, which is there once.
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
  EXPECT_EQ(description.bos_id, std::nullopt);
  EXPECT_EQ(description.eos_id, 299);
  EXPECT_EQ(description.tokenizer_sha256, Digits());
}

TEST(TokenDescriptionTest, ReadsTheOthers) {
  EXPECT_EQ(ParseTokenDescription(With("uint16", "uint32"))->token_bytes, 4);
  EXPECT_EQ(
      ParseTokenDescription(With("\"bos_id\": null", "\"bos_id\": 0"))->bos_id,
      0);
  EXPECT_EQ(ParseTokenDescription(With("299", "null"))->eos_id, std::nullopt);
  EXPECT_EQ(ParseTokenDescription(With('"' + Digits() + '"', "null"))
                ->tokenizer_sha256,
            "");
}

TEST(TokenDescriptionTest, LimitsAreThoseOfTheDtype) {
  const std::string wide = With("uint16", "uint32");
  const auto with_vocab = [](std::string text, const std::string& size) {
    absl::StrReplaceAll({{"300", size}}, &text);
    return ParseTokenDescription(text);
  };
  EXPECT_OK(with_vocab(Good(), "65536"));
  EXPECT_FALSE(with_vocab(Good(), "65537").ok());
  EXPECT_OK(with_vocab(wide, "4294967296"));
  EXPECT_FALSE(with_vocab(wide, "4294967297").ok());
  EXPECT_OK(ParseTokenDescription(
      With("\"num_documents\": 2", "\"num_documents\": 7")));
}

TEST(TokenDescriptionTest, NamesTheKeyThatIsWrong) {
  struct Case {
    std::string key, from, to;
  };
  for (const Case& wrong : {
           Case{"format", "fsdp-tokens", "numpy"},
           Case{"format", "\"fsdp-tokens\"", "1"},
           Case{"version", "\"version\": 1", "\"version\": 0"},
           Case{"version", "\"version\": 1", "\"version\": \"1\""},
           Case{"dtype", "uint16", "uint8"},
           Case{"num_tokens", "7", "-1"},
           Case{"num_tokens", "7", "7.0"},
           Case{"num_tokens", "7", "9223372036854775807"},
           Case{"num_documents", "\"num_documents\": 2",
                "\"num_documents\": 8"},
           Case{"num_documents", "\"num_documents\": 2",
                "\"num_documents\": -1"},
           Case{"vocab_size", "300", "0"},
           Case{"bos_id", "\"bos_id\": null", "\"bos_id\": -1"},
           Case{"eos_id", "299", "300"},
           Case{"tokenizer_sha256", "0f", "0F"},
           Case{"tokenizer_sha256", "0f", "0g"},
           Case{"tokenizer_sha256", "0f", "0"},
       }) {
    EXPECT_THAT(ParseTokenDescription(With(wrong.from, wrong.to)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr('"' + wrong.key + '"')))
        << wrong.to;
  }
}

TEST(TokenDescriptionTest, MissesEveryKey) {
  for (const std::string key :
       {"format", "version", "dtype", "num_tokens", "num_documents",
        "vocab_size", "bos_id", "eos_id", "tokenizer_sha256"}) {
    EXPECT_THAT(ParseTokenDescription(With('"' + key + '"', '"' + key + "_\"")),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(key)));
  }
}

TEST(TokenDescriptionTest, ALaterVersionIsNotRead) {
  EXPECT_THAT(
      ParseTokenDescription(With("\"version\": 1", "\"version\": 2")),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("version 2")));
}

TEST(TokenDescriptionTest, WhatIsNoObjectIsRefused) {
  for (const std::string text : {"", "[]", "1", "{"}) {
    EXPECT_THAT(ParseTokenDescription(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("")));
  }
}

}  // namespace
}  // namespace llama
