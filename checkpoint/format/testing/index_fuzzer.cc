// Runs the parser of indices under libFuzzer, whose flags come before DIR,
// which keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/format/testing:index_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/files/file_system.h"
#include "checkpoint/format/file_plan.h"

namespace fsdp::checkpoint {
namespace {

void Try(absl::string_view text) {
  const absl::StatusOr<FileIndex> index = ParseFileIndex(text);
  if (!index.ok()) return;
  for (const std::string& file : index->files) {
    FSDP_CHECK(IsPlainFileName(file));
  }
  for (const auto& [tensor, file] : index->weights) {
    FSDP_CHECK(file >= 0 && file < static_cast<int>(index->files.size()));
  }
}

}  // namespace
}  // namespace fsdp::checkpoint

// Tries the text of an index. If it is accepted, no file leaves the folder.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::checkpoint::Try({reinterpret_cast<const char*>(data), size});  // NOLINT
  return 0;
}
