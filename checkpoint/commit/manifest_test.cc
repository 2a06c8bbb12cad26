#include "checkpoint/commit/manifest.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/checksums.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

Manifest Example() {
  Manifest manifest;
  manifest.step = 7;
  const uint32_t sum = offload::Crc32c("abc");
  manifest.files["model.safetensors"] = {3, sum, {sum}};
  manifest.files["optimizer/empty"] = {0, 0, {}};
  FileSums large = {2 * kBlockBytes + 1, 0, {1, 0xffffffff, 3}};
  large.crc32c = CombineBlocks(large.bytes, large.blocks);
  manifest.files["optimizer/\"odd\" \xc3\xa9"] = large;
  return manifest;
}

// With the checksum that such a text has.
std::string Resealed(absl::string_view text) {
  const std::string body(text.substr(0, text.rfind(", \"crc32c\"")));
  return absl::StrCat(body, ", \"crc32c\": \"",
                      absl::Hex(offload::Crc32c(body), absl::kZeroPad8),
                      "\"}\n");
}

TEST(ManifestTest, IsReadAsItWasWritten) {
  for (const Manifest& manifest : {Example(), Manifest()}) {
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

// Under a checksum of its own: what no program of ours writes.
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
      {"\"bytes\": 3,", "\"bytes\": -3,", "bytes are no size"},
      {"\"bytes\": 3,", "\"bytes\": 9000000000000000000,", "for each MiB"},
      {"\"crc32c\": \"364b", "\"crc32c\": \"364c", "not that of its blocks"},
      {"\"bytes\": 3,", "\"size\": 3,", "other members"},
      {"364b3fb7\"}", "364b3fb700\"}", "eight digits for each MiB"},
      {"364b3fb7\"}", "364B3FB7\"}", "no digits"},
      {"model.safetensors", "../m", "not relative"},
      {"model.safetensors", "/passwd", "not relative"},
      {"model.safetensors", "a/b/c", "more than one folder"},
      {"model.safetensors", "a\\u0000b", "a control character"},
      {"model.safetensors", "a\\\\b", "or a backslash"},
      {"model.safetensors", "", "not relative"},
      {"model.safetensors", "manifest.json", "that is the manifest"},
      {"model.safetensors", std::string(256, 'a'), "longer than 255"},
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
