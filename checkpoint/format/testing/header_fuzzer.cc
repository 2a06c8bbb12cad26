// Runs the parser of safetensors headers under libFuzzer, whose flags come
// before DIR, which keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/format/testing:header_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "checkpoint/format/safetensors_header.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// Reads the first 8 bytes as the length in a file that is large enough for any.
int64_t DataBytes(absl::string_view input) {
  const absl::StatusOr<int64_t> bytes = ParseSafetensorsLength(input, kHuge);
  return bytes.value_or(0);
}

void Try(absl::string_view input) {
  ParseSafetensorsLength(input, static_cast<int64_t>(input.size()))
      .IgnoreError();
  if (input.size() < kSafetensorsLengthBytes) return;
  const int64_t data_bytes = DataBytes(input);
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(input.substr(kSafetensorsLengthBytes),
                             static_cast<int64_t>(input.size()) + data_bytes);
  if (!header.ok()) return;
  const absl::StatusOr<std::string> text =
      FormatSafetensorsHeader(header->tensors, header->metadata);
  FSDP_CHECK(text.ok());
  const absl::StatusOr<SafetensorsHeader> again = ParseSafetensorsHeader(
      absl::string_view(*text).substr(kSafetensorsLengthBytes),
      static_cast<int64_t>(text->size()) + data_bytes);
  FSDP_CHECK(again.ok());
  FSDP_CHECK(again->tensors == header->tensors);
  FSDP_CHECK(again->metadata == header->metadata);
}

}  // namespace
}  // namespace fsdp::checkpoint

// Tries 8 bytes, which say how much data the file has, and a JSON header. If
// they are accepted, they have to be read again from what is written of them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::checkpoint::Try({reinterpret_cast<const char*>(data), size});  // NOLINT
  return 0;
}
