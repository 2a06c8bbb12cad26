#include "checkpoint/dcp/testing/dcp_fuzzer.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/check.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"

namespace fsdp::checkpoint {
namespace {

void Check(const DcpMetadata& metadata) {
  for (const std::string& file : metadata.files) {
    FSDP_CHECK(!file.empty() && file[0] != '/');
    FSDP_CHECK(("/" + file + "/").find("/../") == std::string::npos);
  }
  for (const DcpTensor& tensor : metadata.tensors) {
    for (const DcpChunk& chunk : tensor.chunks) {
      FSDP_CHECK(chunk.place.offset >= 0 && chunk.place.length >= 0);
      FSDP_CHECK(chunk.place.file >= 0 &&
                 static_cast<size_t>(chunk.place.file) < metadata.files.size());
      for (size_t i = 0; i < tensor.info.shape.size(); ++i) {
        FSDP_CHECK(chunk.box.offsets[i] + chunk.box.sizes[i] <=
                   tensor.info.shape[i]);
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fsdp::checkpoint::DcpMetadata;
  const absl::StatusOr<DcpMetadata> metadata =
      fsdp::checkpoint::ReadDcpMetadata(
          std::string(reinterpret_cast<const char*>(data), size));
  if (metadata.ok()) fsdp::checkpoint::Check(*metadata);
  return 0;
}
