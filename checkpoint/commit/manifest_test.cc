#include "checkpoint/commit/manifest.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/testing/save_files.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

Manifest Example() {
  Manifest manifest;
  manifest.step = 7;
  const uint32_t sum = Crc32c("abc");
  manifest.files["model.safetensors"] = {3, sum, {sum}};
  manifest.files["optimizer/empty"] = {0, 0, {}};
  FileSums large = {2 * kBlockBytes + 1, 0, {1, 0xffffffff, 3}};
  large.crc32c = CombineBlocks(large.bytes, large.blocks);
  manifest.files["optimizer/\"odd\" \xc3\xa9"] = large;
  return manifest;
}

// Gives the text the checksum that it should have.
std::string Resealed(absl::string_view text) {
  const std::string body(text.substr(0, text.rfind(", \"crc32c\"")));
  return absl::StrCat(body, ", \"crc32c\": \"",
                      absl::Hex(Crc32c(body), absl::kZeroPad8), "\"}\n");
}

TEST(ManifestTest, IsReadAsItWasWritten) {
  Manifest longest = Example();
  longest.files[std::string(255, 'a')] = {0, 0, {}};
  for (const Manifest& manifest : {longest, Manifest()}) {
    ASSERT_OK_AND_ASSIGN(const Manifest read,
                         ParseManifest(FormatManifest(manifest), "m"));
    EXPECT_EQ(read, manifest);
  }
  Manifest one;
  one.step = 7;
  one.files["a"] = Example().files["model.safetensors"];
  EXPECT_THAT(
      FormatManifest(one),
      HasSubstr("{\"format\": \"libtorch_fsdp checkpoint\", \"version\": 1, "
                "\"step\": 7, \"block_bytes\": 1048576, \"files\": {\"a\": "
                "{\"bytes\": 3, \"crc32c\": \"364b3fb7\", \"blocks\": "
                "\"364b3fb7\"}}, \"crc32c\": \""));
}

TEST(ManifestTest, EveryFlippedBitAndEveryCutIsNoticed) {
  const std::string text = FormatManifest(Example());
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      EXPECT_THAT(ParseManifest(damaged, "the/manifest.json"),
                  StatusIs(Code::kDataLoss, HasSubstr("the/manifest.json: ")))
          << damaged;
    }
    EXPECT_FALSE(ParseManifest(text.substr(0, i), "m").ok());
  }
}

// The checksums are right, so that no program of ours writes such texts.
TEST(ManifestTest, HostileTextIsRefused) {
  struct Case {
    absl::string_view from;
    std::string to;
    std::string why;
  };
  const Case cases[] = {
      {"libtorch_fsdp checkpoint", "another", "its format is not"},
      {"\"version\": 1", "\"version\": \"1\"", "no version"},
      {"\"step\": 7", "\"step\": -7", "step is no number"},
      {"\"step\": 7", "\"step\": 7, \"more\": 1", "other members"},
      {"1048576", "4096", "block_bytes"},
      {"\"bytes\": 3,", "\"bytes\": -3,", "its members are not"},
      {"\"bytes\": 3,", "\"bytes\": 9000000000000000000,", "for each MiB"},
      {"\"crc32c\": \"364b", "\"crc32c\": \"364c", "fit its blocks"},
      {"\"bytes\": 3,", "\"size\": 3,", "its members are not"},
      {"364b3fb7\"}", "364b3fb700\"}", "digits of blocks for each MiB"},
      {"364b3fb7\"}", "364B3FB7\"}", "its members are not"},
      {"model.safetensors", "../m", "is no file of"},
      {"model.safetensors", "/passwd", "is no file of"},
      {"model.safetensors", "a/..", "is no file of"},
      {"model.safetensors", "a/", "is no file of"},
      {"model.safetensors", "a/b/c", "is no file of"},
      {"model.safetensors", "a\\u0000b", "is no file of"},
      {"model.safetensors", "a\\\\b", "is no file of"},
      {"model.safetensors", "", "is no file of"},
      {"model.safetensors", "manifest.json", "is no file of"},
      {"model.safetensors", std::string(256, 'a'), "is no file of"},
      {"model.safetensors", "optimizer/empty", "given twice"},
  };
  const std::string text = FormatManifest(Example());
  for (const Case& test : cases) {
    const std::string changed =
        Resealed(absl::StrReplaceAll(text, {{test.from, test.to}}));
    EXPECT_THAT(ParseManifest(changed, "m"),
                StatusIs(Code::kDataLoss, HasSubstr(test.why)))
        << test.from << " -> " << test.to;
  }
  EXPECT_THAT(ParseManifest(Resealed(absl::StrReplaceAll(
                                text, {{"\"version\": 1", "\"version\": 2"}})),
                            "m"),
              StatusIs(Code::kUnimplemented,
                       HasSubstr("load it with a newer program")));
}

}  // namespace
}  // namespace fsdp::checkpoint

namespace fsdp::checkpoint::testing {
namespace {

using ::testing::AllOf;
using ::testing::IsEmpty;

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() {
    contents_["large"] = std::string(5 * kBlockBytes + 1, 'x');
    contents_["empty"] = "";
    EXPECT_OK(files_.MakeFolder("/c"));
    manifest_ = *WriteFiles(files_, "/c", 1, contents_);
  }

  std::vector<Problem> Problems() {
    auto problems = VerifyFiles(files_, "/c", manifest_, nullptr);
    EXPECT_OK(problems);
    return *problems;
  }

  void Put(const std::string& name, const std::string& bytes) {
    ASSERT_OK(ReplaceFile(files_, JoinPath("/c", name), bytes));
  }

  SimulatedFileSystem files_;
  Contents contents_ = ContentsOf(1);
  Manifest manifest_;
};

TEST_F(VerifyTest, ASoundOneHasNone) {
  int64_t done = 0;
  int64_t total = 0;
  const auto progress = [&](int64_t now, int64_t of) {
    EXPECT_GT(now, done);
    done = now;
    total = of;
  };
  EXPECT_THAT(*VerifyFiles(files_, "/c", manifest_, progress), IsEmpty());
  EXPECT_EQ(done, total);
  EXPECT_GT(total, 5 * kBlockBytes);
  EXPECT_OK(ProblemsStatus("/c", {}));
}

TEST_F(VerifyTest, EveryKindOfFileAndEveryKindOfDamage) {
  for (const auto& [name, bytes] : contents_) {
    struct Case {
      std::string bytes;
      const char* text;
    };
    std::vector<Case> cases = {{bytes + "?", " bytes instead of "}};
    if (!bytes.empty()) {
      cases.push_back({bytes.substr(1), " bytes instead of "});
      for (const size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
        cases.push_back({bytes, "are damaged"});
        cases.back().bytes[at] ^= 4;
      }
    }
    for (const Case& test : cases) {
      Put(name, test.bytes);
      const std::vector<Problem> problems = Problems();
      ASSERT_EQ(problems.size(), 1);
      EXPECT_THAT(problems[0].text, HasSubstr(test.text));
      EXPECT_EQ(problems[0].file, name);
    }
    ASSERT_OK(files_.RemoveFile(JoinPath("/c", name)));
    ASSERT_EQ(Problems().size(), 1);
    EXPECT_THAT(Problems()[0].text, HasSubstr("is missing"));
    Put(name, bytes);
  }
  EXPECT_THAT(Problems(), IsEmpty());
}

TEST_F(VerifyTest, AllAreListed) {
  std::string damaged = contents_["large"];
  for (const int64_t block : {1, 2, 4}) damaged[block * kBlockBytes] = '!';
  Put("large", damaged);
  std::string& second = contents_["optimizer/exp_avg.safetensors"];
  second[0] = static_cast<char>(second[0] ^ 1);
  Put("optimizer/exp_avg.safetensors", second);
  Put("optimizer/more", "1");
  Put("trainer.json", "");
  ASSERT_OK(files_.RemoveFile("/c/model.safetensors"));
  EXPECT_THAT(
      ProblemsStatus("/c", Problems()),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr("/c: it is not what its manifest says"),
                     HasSubstr("large: MiB [1, 3) are damaged: CRC32C "),
                     HasSubstr("large: MiB [4, 5) are damaged"),
                     HasSubstr("exp_avg.safetensors: MiB [0, 1) are damaged"),
                     HasSubstr("optimizer/more: is there, and the manifest"),
                     HasSubstr("trainer.json: has 0 bytes instead of 14"),
                     HasSubstr("model.safetensors: is missing"),
                     HasSubstr("Load an older checkpoint."))));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
