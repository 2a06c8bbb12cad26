#include "checkpoint/torch_archive/testing/memory_file.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "checkpoint/torch_archive/crc32.h"

namespace fsdp::checkpoint::testing {

ReadAt ReadFrom(absl::string_view bytes) {
  return [bytes](int64_t offset, absl::Span<char> into) {
    const auto size = static_cast<int64_t>(bytes.size());
    FSDP_CHECK(offset >= 0 && offset <= size &&
               static_cast<int64_t>(into.size()) <= size - offset);
    const absl::string_view part =
        bytes.substr(static_cast<size_t>(offset), into.size());
    std::copy(part.begin(), part.end(), into.begin());
    return absl::OkStatus();
  };
}

std::string Assemble(const ArchiveLayout& layout,
                     absl::Span<const std::string> payloads) {
  FSDP_CHECK(payloads.size() == layout.payloads().size());
  std::string zip(static_cast<size_t>(layout.bytes()), '?');
  std::vector<uint32_t> crcs;
  for (size_t i = 0; i < payloads.size(); ++i) {
    const ArchivePayload& place = layout.payloads()[i];
    FSDP_CHECK(static_cast<int64_t>(payloads[i].size()) == place.bytes);
    crcs.push_back(Crc32(payloads[i]));
    zip.replace(static_cast<size_t>(place.offset), payloads[i].size(),
                payloads[i]);
  }
  for (const ArchivePiece& piece : layout.Frame(crcs)) {
    FSDP_CHECK(piece.offset + static_cast<int64_t>(piece.bytes.size()) <=
               layout.bytes());
    zip.replace(static_cast<size_t>(piece.offset), piece.bytes.size(),
                piece.bytes);
  }
  return zip;
}

}  // namespace fsdp::checkpoint::testing
