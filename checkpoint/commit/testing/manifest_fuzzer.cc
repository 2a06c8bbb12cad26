// Runs the parser of manifests under libFuzzer, whose flags come before DIR,
// which keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/commit/testing:manifest_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/files/checksums.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint {
namespace {

void Try(absl::string_view text) {
  const absl::StatusOr<Manifest> manifest = ParseManifest(text, "manifest");
  if (!manifest.ok()) return;
  FSDP_CHECK(manifest->step >= 0);
  for (const auto& [name, sums] : manifest->files) {
    FSDP_CHECK(CheckFileName(name).ok());
    FSDP_CHECK(sums.bytes >= 0);
    FSDP_CHECK(static_cast<int64_t>(sums.blocks.size()) ==
               BlocksOf(sums.bytes));
  }
  const absl::StatusOr<Manifest> again =
      ParseManifest(FormatManifest(*manifest), "manifest");
  FSDP_CHECK(again.ok() && *again == *manifest);
}

// Tries the text with the right checksum at its end.
void TryWithChecksum(absl::string_view text) {
  constexpr absl::string_view kBeforeSum = ", \"crc32c\": \"";
  const absl::string_view body = text.substr(0, text.rfind(kBeforeSum));
  const uint32_t sum = Crc32c(body);
  Try(absl::StrCat(body, kBeforeSum, absl::Hex(sum, absl::kZeroPad8), "\"}\n"));
}

}  // namespace
}  // namespace fsdp::checkpoint

// Tries the text of a manifest as it is, and with the checksum that it should
// have, which a fuzzer cannot guess. What is accepted names files that lie in
// the checkpoint, with a checksum for each block, and says the same when it is
// written again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data),  // NOLINT
                               size);
  fsdp::checkpoint::Try(text);
  fsdp::checkpoint::TryWithChecksum(text);
  return 0;
}
