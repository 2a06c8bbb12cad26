#include "testing/gpt/text_corpus.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

class TextCorpusTest : public ::testing::Test {
 protected:
  TextCorpusTest() { std::filesystem::create_directory(directory_); }
  ~TextCorpusTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(absl::string_view name) {
    return absl::StrCat(directory_, "/", name);
  }
  void Write(absl::string_view name, absl::string_view text) {
    const std::filesystem::path path = Path(name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }

  const std::string directory_ =
      absl::StrCat(::testing::TempDir(), "/text_corpus_test.", getpid());
};

TEST_F(TextCorpusTest, ReadsADirectoryInTheOrderOfPathsWithoutBinaries) {
  Write("b.h", "2");
  Write("a/z.h", "1");
  Write("c.h", "3");
  Write(".hidden", "no");
  Write(".git/x", "no");
  Write("binary", std::string("n\0o", 3));
  ASSERT_EQ(symlink("/nowhere", Path("dangling").c_str()), 0);
  ASSERT_EQ(symlink(directory_.c_str(), Path("loop").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(TextCorpus corpus, ReadTextCorpus(directory_, 0));
  EXPECT_EQ(corpus.train, "123");
  EXPECT_EQ(corpus.num_files, 3);
}

TEST_F(TextCorpusTest, ReadsAFile) {
  Write("text", std::string(100, 'x') + "\xFF");
  ASSERT_OK_AND_ASSIGN(TextCorpus corpus, ReadTextCorpus(Path("text"), 5));
  EXPECT_EQ(corpus.num_files, 1);
  EXPECT_EQ(corpus.largest_byte, 0xFF);
  EXPECT_EQ(corpus.train.size() + corpus.validation.size(), 101);
}

TEST_F(TextCorpusTest, SaysWhyThereIsNoText) {
  EXPECT_THAT(ReadTextCorpus(Path("none"), 1).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/none")));
  Write("empty", "");
  EXPECT_THAT(ReadTextCorpus(Path("empty"), 1).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("/empty"), HasSubstr("0 bytes"))));
  Write("short", std::string(200, 'x'));
  EXPECT_THAT(ReadTextCorpus(Path("short"), 11).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("200 bytes are too few: of the 10 held out "
                                 "for validation, 11 are needed")));
  std::filesystem::create_directory(Path("folder"));
  EXPECT_THAT(ReadTextCorpus(Path("folder"), 1).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has no text files")));
}

TEST(SplitTextTest, HoldsOutEvery20thBlock) {
  std::string text;
  for (int i = 0; i < 40 * 65536; ++i) {
    text.push_back(static_cast<char>('A' + i / 65536 % 40));
  }
  const TextCorpus corpus = SplitText(text);
  EXPECT_EQ(corpus.validation.size(), 2 * 65536);
  EXPECT_EQ(corpus.validation.front(), 'A' + 19);
  EXPECT_EQ(corpus.validation.back(), 'A' + 39);
  EXPECT_EQ(corpus.train.size(), 38 * 65536);
  EXPECT_EQ(corpus.train.find('A' + 19), std::string::npos);
}

TEST(SplitTextTest, SmallTextsAreSplitAlike) {
  const TextCorpus corpus = SplitText(std::string(19, 'x') + "yz");
  EXPECT_EQ(corpus.validation, "y");
  EXPECT_EQ(corpus.train.size(), 20);
  EXPECT_EQ(SplitText("").train, "");
  EXPECT_EQ(SplitText("abc").train, "abc");
}

}  // namespace
}  // namespace gpt
