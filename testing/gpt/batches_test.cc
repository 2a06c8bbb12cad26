#include "testing/gpt/batches.h"

#include <ATen/ops/full.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

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
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Values(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + dense.numel());
}

// Python gives these for ranks 0 and 1:
//   g = torch.Generator().manual_seed(1234 + rank)
//   torch.randint(0, 256, (2, 4), generator=g)[:, 0]  # twice
TEST(CountDataTest, IsTheStreamOfThePeer) {
  CountData rank0(256, {2, 3}, /*rank=*/0);
  const Batch first = rank0.Next();
  EXPECT_THAT(Values(first.inputs), ElementsAre(47, 48, 49, 204, 205, 206));
  EXPECT_THAT(Values(first.targets), ElementsAre(48, 49, 50, 205, 206, 207));
  EXPECT_THAT(Values(rank0.Next().inputs),
              ElementsAre(143, 144, 145, 154, 155, 156));
  CountData rank1(256, {2, 3}, /*rank=*/1);
  EXPECT_THAT(Values(rank1.Next().inputs),
              ElementsAre(203, 204, 205, 195, 196, 197));
  // Tokens are modulo the vocabulary.
  const Batch small = CountData(/*vocab=*/3, {1, 5}, /*rank=*/0).Next();
  const std::vector<int64_t> inputs = Values(small.inputs);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(inputs[i + 1], (inputs[i] + 1) % 3);
  EXPECT_EQ(Values(small.targets)[4], (inputs[4] + 1) % 3);
}

// Byte i of the text is i.
std::string Ramp(int size) {
  std::string text;
  for (int i = 0; i < size; ++i) text.push_back(static_cast<char>(i));
  return text;
}

TEST(TextBatchesTest, TargetsFollowInputs) {
  const Batch batch = WindowsAt(
      "ab\xFF"
      "d",
      {0, 1}, 2);
  EXPECT_THAT(Values(batch.inputs), ElementsAre('a', 'b', 'b', 255));
  EXPECT_THAT(Values(batch.targets), ElementsAre('b', 255, 255, 'd'));
  // A text of one window is enough.
  RandomWindows windows("abc", {1, 2}, /*seed=*/1);
  EXPECT_THAT(Values(windows.Next().targets), ElementsAre('b', 'c'));
}

TEST(TextBatchesTest, RandomWindowsReachAllPlacesAndNoOthers) {
  const std::string text = Ramp(9);
  RandomWindows windows(text, {4, 5}, /*seed=*/1);
  std::set<int64_t> starts;
  for (int i = 0; i < 50; ++i) {
    const Batch batch = windows.Next();
    for (int row = 0; row < 4; ++row) {
      const std::vector<int64_t> inputs = Values(batch.inputs[row]);
      EXPECT_EQ(inputs[4], inputs[0] + 4);
      EXPECT_EQ(Values(batch.targets[row])[4], inputs[0] + 5);
      starts.insert(inputs[0]);
    }
  }
  EXPECT_THAT(starts, ElementsAre(0, 1, 2, 3));
}

TEST(TextBatchesTest, StreamsDependOnTheSeedAlone) {
  const std::string text = Ramp(200);
  RandomWindows a(text, {8, 3}, 1), b(text, {8, 3}, 1), c(text, {8, 3}, 2);
  const std::vector<int64_t> first = Values(a.Next().inputs);
  EXPECT_EQ(first, Values(b.Next().inputs));
  EXPECT_NE(first, Values(c.Next().inputs));
  EXPECT_NE(first, Values(a.Next().inputs));
}

TEST(TextBatchesTest, EvenWindowsAreSharedBetweenRanks) {
  const std::string text = Ramp(102);
  std::multiset<int64_t> starts;
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<Batch> batches = EvenWindows(text, {2, 2}, 9, rank, 2);
    ASSERT_EQ(batches.size(), 2);
    for (const Batch& batch : batches) {
      starts.insert(Values(batch.inputs)[0]);
      starts.insert(Values(batch.inputs)[2]);
    }
  }
  EXPECT_THAT(starts, ElementsAre(0, 11, 22, 33, 44, 55, 66, 77));
}

// Gives 100 * part, 100 * part + 1, ...
class Numbers final : public BatchSource {
 public:
  explicit Numbers(int part) : next_(int64_t{100} * part) {}
  Batch Next() override {
    const at::Tensor number = at::full({1, 1}, next_++, at::kLong);
    return {number, number};
  }

 private:
  int64_t next_;
};

// Part 1 comes late, goes away and is taken up again.
TEST(PartBatchesTest, AreThoseOfTheStepAndPart) {
  PartBatches batches([](int part) { return std::make_unique<Numbers>(part); });
  const struct {
    int64_t step;
    int part;
    int64_t number;
  } cases[] = {{0, 0, 0},   {1, 0, 1}, {7, 1, 107},
               {8, 1, 108}, {9, 0, 9}, {10, 1, 110}};
  for (const auto& c : cases) {
    batches.Select(c.step, c.part);
    EXPECT_EQ(batches.Next().inputs.item<int64_t>(), c.number);
  }
}

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
