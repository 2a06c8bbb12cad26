// Reads what a kept file store says about itself under libFuzzer, whose flags,
// such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //offload/testing:commit_record_fuzz -- DIR
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/files/checksums.h"
#include "offload/commit_record.h"
#include "offload/param_store.h"

namespace fsdp::offload {
namespace {

// Returns `payload` behind the frame of `example`, made to fit.
std::string Framed(const std::string& example, absl::string_view payload) {
  std::string bytes = example.substr(0, 8);
  const uint32_t checksum = Crc32c(payload);
  const auto length = static_cast<int64_t>(payload.size());
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  bytes.append(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes.append(payload.data(), payload.size());
  return bytes;
}

void CheckRecord(const CommitRecord& record, const FileHeader& header,
                 size_t size) {
  FSDP_CHECK(record.regions.size() <= size);
  for (const auto& region : record.regions) {
    FSDP_CHECK(region->offset >= 0 && region->bytes >= 0);
    FSDP_CHECK(region->offset <= header.capacity - StoredBytes(region->bytes));
    FSDP_CHECK(region->blocks.size() <= size);
  }
  FSDP_CHECK(CommitRecord::Decode(record.Encode(), header).ok());
}

void Read(const std::string& header_bytes, const std::string& record_bytes) {
  const absl::StatusOr<FileHeader> header = FileHeader::Decode(header_bytes);
  if (!header.ok()) return;
  FSDP_CHECK(CommitRecord::MaxBytes(*header) > 0);
  const absl::StatusOr<CommitRecord> record =
      CommitRecord::Decode(record_bytes, *header);
  if (record.ok()) CheckRecord(*record, *header, record_bytes.size());
}

}  // namespace
}  // namespace fsdp::offload

// The first byte says how many of the others are the header's payload; the rest
// is the record's. Both get right checksums, or are read as they are if the
// first byte is 0. Stops the program if what is read cannot lie in the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fsdp::offload::CommitRecord;
  using fsdp::offload::FileHeader;
  if (size == 0) return 0;
  const absl::string_view all(reinterpret_cast<const char*>(data) + 1,
                              size - 1);
  if (data[0] == 0) {
    const std::string bytes(all);
    fsdp::offload::Read(bytes, bytes);
    return 0;
  }
  const size_t split = data[0] < all.size() ? data[0] : all.size();
  fsdp::offload::Read(
      fsdp::offload::Framed(FileHeader().Encode(), all.substr(0, split)),
      fsdp::offload::Framed(CommitRecord().Encode(), all.substr(split)));
  return 0;
}
