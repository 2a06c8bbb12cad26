// The readers of catalogs under libFuzzer, whose flags come before DIR, which
// keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/format/testing:catalog_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostElements = 4096;  // of the runs that are looked at

void CheckRuns(const Catalog& catalog, const StoredTensor& tensor) {
  const int64_t numel = *NumelOf(tensor.info);
  const int64_t item = ItemBytes(tensor.info.dtype);
  if (item == 0) return;
  const int64_t end = std::min(numel, kMostElements);
  const absl::StatusOr<std::vector<FileRun>> runs =
      RunsOf(tensor, end / 3, end);
  FSDP_CHECK(runs.ok());
  int64_t next = 0;
  for (const FileRun& run : *runs) {
    FSDP_CHECK(run.target == next && run.bytes > 0 && run.offset >= 0);
    FSDP_CHECK(run.bytes <= catalog.files()[run.file].bytes - run.offset);
    next += run.bytes;
  }
  FSDP_CHECK(next == (end - end / 3) * item);
}

void Try(absl::string_view input) {
  const absl::StatusOr<int64_t> data_bytes =
      ParseSafetensorsLength(input, kHuge);
  if (!data_bytes.ok()) return;
  input.remove_prefix(kSafetensorsLengthBytes);
  const size_t nul = std::min(input.find('\0'), input.size());
  const absl::string_view sharding = input.substr(0, nul);
  input.remove_prefix(std::min(nul + 1, input.size()));
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(
      input, kSafetensorsLengthBytes + static_cast<int64_t>(input.size()) +
                 *data_bytes);
  if (!header.ok()) return;
  if (!sharding.empty()) {
    header->metadata["DCP_SHARDING_INFO"] = std::string(sharding);
  }
  const absl::StatusOr<Catalog> catalog =
      CatalogOfSafetensors({{"file", *std::move(header)}});
  if (!catalog.ok()) return;
  for (const StoredTensor& tensor : catalog->tensors()) {
    CheckRuns(*catalog, tensor);
  }
}

}  // namespace
}  // namespace fsdp::checkpoint

// 8 bytes, which say how much data the file has, a text of sharding info, a NUL
// and a JSON header, whose own sharding info counts where the text is empty.
// The runs of what is accepted fill each tensor from inside the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::checkpoint::Try({reinterpret_cast<const char*>(data), size});  // NOLINT
  return 0;
}
