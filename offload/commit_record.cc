#include "offload/commit_record.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/files/checksums.h"
#include "base/plain_bytes.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

constexpr uint64_t kHeaderMagic = 0x6665727061706402;
constexpr uint64_t kVersionMask = 0xff;  // of the header's magic
constexpr uint64_t kRecordMagic = 0x6665727072656301;
// Magic, checksum of the payload, its length.
constexpr int64_t kFrameBytes = 8 + 4 + 8;

std::string Framed(uint64_t magic, absl::string_view payload) {
  std::string bytes;
  AppendValue(bytes, magic);
  AppendValue(bytes, Crc32c(payload));
  AppendText(bytes, payload);
  return bytes;
}

absl::StatusOr<absl::string_view> Unframed(uint64_t magic,
                                           absl::string_view bytes) {
  BytesReader reader(bytes);
  if (reader.Take<uint64_t>() != magic) {
    return absl::DataLossError("does not start as one does");
  }
  const auto checksum = reader.Take<uint32_t>();
  absl::string_view payload = reader.TakeText();
  if (!reader.ok()) return absl::DataLossError("is cut off");
  if (Crc32c(payload) != checksum) {
    return absl::DataLossError("does not fit its checksum");
  }
  return payload;
}

// These limits exceed any disk and are small enough to add and multiply.
constexpr int64_t kMaxCapacity = int64_t{1} << 56;
constexpr int64_t kMaxRegions = int64_t{1} << 40;

bool Plausible(const FileHeader& header) {
  return header.block_bytes > 0 && header.block_bytes <= kMaxCapacity &&
         header.block_bytes % kPageBytes == 0 && header.capacity >= 0 &&
         header.capacity <= kMaxCapacity && header.capacity % kPageBytes == 0 &&
         header.max_regions >= 0 && header.max_regions <= kMaxRegions;
}

constexpr uint8_t kChecksums = 1;  // in a header: blocks have checksums
constexpr int64_t kBlockBytes = 4 + 4 + 1;

absl::StatusOr<std::shared_ptr<StoredRegion>> TakeRegion(
    BytesReader& reader, const FileHeader& header) {
  const std::string name(reader.TakeText());
  const auto bytes = reader.Take<int64_t>();
  const auto offset = reader.Take<int64_t>();
  const auto blocks = reader.Take<int64_t>();
  const bool fits =
      reader.ok() && bytes >= 0 && offset >= 0 && bytes <= header.capacity &&
      offset <= header.capacity - StoredBytes(bytes) &&
      blocks == (bytes + header.block_bytes - 1) / header.block_bytes &&
      blocks <= reader.left() / kBlockBytes;
  if (!fits) return absl::DataLossError("has a region that cannot be");
  auto region =
      std::make_shared<StoredRegion>(name, bytes, offset, header.block_bytes);
  for (Block& block : region->blocks) {
    block.current.generation = reader.Take<uint32_t>();
    block.current.checksum = reader.Take<uint32_t>();
    block.place = reader.Take<uint8_t>();
    if (block.place > 1) return absl::DataLossError("has a block nowhere");
    block.Commit();
  }
  return region;
}

}  // namespace

std::string FileHeader::Encode() const {
  FSDP_CHECK(static_cast<int64_t>(owner.size()) <= kMaxOwnerBytes);
  std::string payload;
  AppendValue(payload, file_id);
  AppendValue(payload, run);
  AppendValue(payload, capacity);
  AppendValue(payload, block_bytes);
  AppendValue(payload, max_regions);
  AppendValue(payload, kChecksums);
  AppendText(payload, owner);
  std::string bytes = Framed(kHeaderMagic, payload);
  bytes.resize(kHeaderBytes);
  return bytes;
}

absl::StatusOr<FileHeader> FileHeader::Decode(absl::string_view bytes) {
  const auto magic = BytesReader(bytes).Take<uint64_t>();
  if (magic != kHeaderMagic &&
      (magic & ~kVersionMask) == (kHeaderMagic & ~kVersionMask)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "is of version ", magic & kVersionMask,
        " of its format, and this "
        "program reads version ",
        kHeaderMagic & kVersionMask,
        "; go on with the program that made it, or remove the file"));
  }
  FSDP_ASSIGN_OR_RETURN(const absl::string_view payload,
                        Unframed(kHeaderMagic, bytes));
  BytesReader reader(payload);
  FileHeader header;
  header.file_id = reader.Take<uint64_t>();
  header.run = reader.Take<uint64_t>();
  header.capacity = reader.Take<int64_t>();
  header.block_bytes = reader.Take<int64_t>();
  header.max_regions = reader.Take<int64_t>();
  const bool has_checksums = reader.Take<uint8_t>() == kChecksums;
  header.owner = std::string(reader.TakeText());
  if (!reader.ok() || !has_checksums || !Plausible(header)) {
    return absl::DataLossError("has values that cannot be");
  }
  return header;
}

std::string CommitRecord::Encode() const {
  std::string payload;
  AppendValue(payload, file_id);
  AppendValue(payload, commit);
  AppendValue(payload, static_cast<int64_t>(regions.size()));
  for (const auto& region : regions) {
    AppendText(payload, region->name);
    AppendValue(payload, region->bytes);
    AppendValue(payload, region->offset);
    AppendValue(payload, static_cast<int64_t>(region->blocks.size()));
    for (const Block& block : region->blocks) {
      AppendValue(payload, block.current.generation);
      AppendValue(payload, block.current.checksum);
      AppendValue(payload, block.place);
    }
  }
  return Framed(kRecordMagic, payload);
}

absl::StatusOr<CommitRecord> CommitRecord::Decode(absl::string_view bytes,
                                                  const FileHeader& header) {
  FSDP_ASSIGN_OR_RETURN(const absl::string_view payload,
                        Unframed(kRecordMagic, bytes));
  BytesReader reader(payload);
  CommitRecord record;
  record.file_id = reader.Take<uint64_t>();
  record.commit = reader.Take<int64_t>();
  if (record.file_id != header.file_id) {
    return absl::DataLossError("is of another file");
  }
  const auto regions = reader.Take<int64_t>();
  for (int64_t i = 0; i < regions; ++i) {
    FSDP_ASSIGN_OR_RETURN(record.regions.emplace_back(),
                          TakeRegion(reader, header));
  }
  if (!reader.ok()) return absl::DataLossError("is cut off");
  return record;
}

int64_t CommitRecord::MaxBytes(const FileHeader& header) {
  constexpr int64_t kRegionBytes = 8 + kMaxNameBytes + 8 + 8 + 8;
  // Each region can have one block that is not full.
  const int64_t blocks =
      header.capacity / header.block_bytes + header.max_regions;
  return kFrameBytes + 8 + 8 + 8 + header.max_regions * kRegionBytes +
         blocks * kBlockBytes;
}

namespace {

// Runs a request while nothing else is in flight. A Wake() that comes meanwhile
// is handed on to the next Wait().
absl::Status Run(IoQueue& queue, IoRequest request, absl::string_view what,
                 absl::string_view path) {
  queue.Start(&request);
  std::vector<IoRequest*> over;
  while (over.empty()) queue.Wait(over);
  FSDP_CHECK(over.size() == 1 && over[0] == &request);
  queue.Wake();
  return CheckMoved(request, what, path);
}

}  // namespace

absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path) {
  FSDP_RETURN_IF_ERROR(Run(queue,
                           {IoRequest::Kind::kRead, memory, kHeaderBytes, 0, 0},
                           "read the header", path));
  absl::StatusOr<FileHeader> header =
      FileHeader::Decode(absl::string_view(memory, kHeaderBytes));
  if (header.ok()) return header;
  if (absl::IsFailedPrecondition(header.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "read the header of ", path, ": it ", header.status().message()));
  }
  return absl::DataLossError(absl::StrCat(
      "read the header of ", path, ": it ", header.status().message(),
      "; this is no file of an offload store, or it has been changed"));
}

absl::StatusOr<CommitLog> CommitLog::Make(const FileLayout& layout) {
  FSDP_ASSIGN_OR_RETURN(
      PageMemory memory,
      PageMemory::Allocate(PageAllocator::System(),
                           std::max(layout.record_bytes, kHeaderBytes)));
  return CommitLog(layout, std::move(memory));
}

absl::Status CommitLog::WriteHeader(IoQueue& queue) {
  return WriteAt(queue, "write the header", layout_->header.Encode(), 0);
}

absl::Status CommitLog::Write(IoQueue& queue, const CommitRecord& record) {
  return WriteAt(queue, absl::StrCat("commit ", record.commit), record.Encode(),
                 layout_->RecordStart(record.commit));
}

absl::StatusOr<std::vector<CommitRecord>> CommitLog::ReadAll(IoQueue& queue) {
  std::vector<CommitRecord> records;
  for (const int64_t turn : {0, 1}) {
    FSDP_RETURN_IF_ERROR(
        Run(queue,
            {IoRequest::Kind::kRead, memory_.data(), layout_->record_bytes,
             layout_->RecordStart(turn), 0},
            "read a commit", layout_->path));
    absl::StatusOr<CommitRecord> record = CommitRecord::Decode(
        absl::string_view(memory_.data(), layout_->record_bytes),
        layout_->header);
    // The record was never finished, or has been dropped.
    if (!record.ok()) continue;
    records.push_back(*std::move(record));
  }
  std::sort(records.begin(), records.end(),
            [](const CommitRecord& a, const CommitRecord& b) {
              return a.commit < b.commit;
            });
  return records;
}

absl::Status CommitLog::Drop(IoQueue& queue, int64_t commit) {
  return WriteAt(queue, absl::StrCat("drop commit ", commit), "",
                 layout_->RecordStart(commit));
}

// Writes whole pages, with zeros behind `bytes`; an empty `bytes` writes a page
// of zeros.
absl::Status CommitLog::WriteAt(IoQueue& queue, absl::string_view what,
                                absl::string_view bytes, int64_t offset) {
  const int64_t size =
      std::max(kPageBytes, StoredBytes(static_cast<int64_t>(bytes.size())));
  FSDP_CHECK(size <= memory_.bytes());
  std::memset(memory_.data(), 0, size);
  bytes.copy(memory_.data(), bytes.size());
  return Run(queue, {IoRequest::Kind::kWrite, memory_.data(), size, offset, 0},
             what, layout_->path);
}

absl::Status CommitLog::Sync(IoQueue& queue, absl::string_view what) {
  return Run(queue, {IoRequest::Kind::kSync, nullptr, 0, 0, 0}, what,
             layout_->path);
}

}  // namespace fsdp::offload
