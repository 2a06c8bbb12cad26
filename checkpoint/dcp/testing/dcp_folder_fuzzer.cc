#include "checkpoint/dcp/testing/dcp_folder_fuzzer.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/dcp_optimizer.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kFolder[] = "/dcp";
constexpr size_t kLengthBytes = 2;
// More are not worth their time.
constexpr size_t kMaxFiles = 4;

void Put(FileSystem& files, const std::string& name, absl::string_view bytes) {
  const auto file =
      files.OpenForWriting(JoinPath(kFolder, name), Caching::kCached);
  // A folder may have the name already.
  if (!file.ok()) return;
  FSDP_CHECK((*file)->PWrite(0, absl::MakeConstSpan(bytes)).ok());
}

void Check(const Catalog& catalog) {
  for (const StoredTensor& tensor : catalog.tensors()) {
    for (const StoredBox& box : tensor.boxes) {
      int64_t bytes = ItemBytes(tensor.info.dtype);
      for (const int64_t size : box.sizes) bytes *= size;
      FSDP_CHECK(box.offset >= 0 && bytes >= 0);
      FSDP_CHECK(box.offset + bytes <= catalog.files()[box.file].bytes);
    }
  }
}

void ReadFolder(absl::string_view metadata, absl::string_view contents) {
  const absl::StatusOr<DcpMetadata> first =
      ReadDcpMetadata(std::string(metadata));
  if (!first.ok() || first->files.size() > kMaxFiles) return;
  testing::SimulatedFileSystem files;
  FSDP_CHECK(files.MakeFolder(kFolder).ok());
  Put(files, kDcpMetadataFile, metadata);
  for (const std::string& name : first->files) {
    // Others would need folders.
    if (name.find('/') == std::string::npos) Put(files, name, contents);
  }
  absl::StatusOr<DcpMetadata> all = ReadDcpFolder(files, kFolder);
  // A file may have taken the place of `.metadata`.
  if (!all.ok()) return;
  const std::vector<DcpTensor> model = TakeModel(*all);
  const absl::StatusOr<Catalog> found =
      FindDcpTensors(files, kFolder, all->files, model);
  if (found.ok()) Check(*found);
  const absl::StatusOr<DcpOptimizer> optimizer =
      ReadDcpOptimizer(files, kFolder, *all);
  if (!optimizer.ok()) return;
  for (const auto& [name, catalog] : optimizer->slots) Check(catalog);
}

}  // namespace
}  // namespace fsdp::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view all(reinterpret_cast<const char*>(data), size);
  if (size < fsdp::checkpoint::kLengthBytes) return 0;
  const absl::string_view rest = all.substr(fsdp::checkpoint::kLengthBytes);
  const size_t length = data[0] + size_t{256} * data[1];
  if (length > rest.size()) return 0;
  fsdp::checkpoint::ReadFolder(rest.substr(0, length), rest.substr(length));
  return 0;
}
