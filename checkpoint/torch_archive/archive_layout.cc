#include "checkpoint/torch_archive/archive_layout.h"

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/torch_archive/archive_pickle.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/zip_format.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kMinAlignment = 64;
constexpr int64_t kMaxAlignment = 4096;
// Of the whole, far from where 64 bits end.
constexpr int64_t kMaxBytes = int64_t{1} << 60;

bool IsLarge(int64_t value) { return value >= int64_t{zip::kIn64}; }

// The extra field with what the header's 32 bits do not hold, in front of
// padding, as PyTorch's own writer makes it.
std::string Extra64(int64_t size, int64_t header) {
  if (!IsLarge(size) && !IsLarge(header)) return "";
  std::string extra;
  zip::Put(extra, zip::kExtra64, 2);
  zip::Put(extra, (IsLarge(size) ? 16 : 0) + (IsLarge(header) ? 8 : 0), 2);
  if (IsLarge(size)) {
    zip::Put(extra, size, 8);
    zip::Put(extra, size, 8);
  }
  if (IsLarge(header)) zip::Put(extra, header, 8);
  return extra;
}

}  // namespace

absl::StatusOr<ArchiveLayout> ArchiveLayout::Create(const Value& value,
                                                    int64_t alignment) {
  FSDP_CHECK(alignment >= kMinAlignment && alignment <= kMaxAlignment &&
             (alignment & (alignment - 1)) == 0);
  FSDP_ASSIGN_OR_RETURN(ArchivePickle pickle, PickleArchive(value));
  int64_t total = 0;
  for (const int64_t bytes : pickle.storage_bytes) {
    if (bytes > kMaxBytes || (total += bytes) > kMaxBytes) {
      return absl::InvalidArgumentError(
          "torch.save file: tensors of more than 2^60 bytes");
    }
  }
  ArchiveLayout layout;
  layout.Add("archive/data.pkl", std::move(pickle.bytes));
  layout.Add("archive/.format_version", "1");
  layout.Add("archive/.storage_alignment", absl::StrCat(alignment));
  layout.Add("archive/byteorder", "little");
  for (size_t i = 0; i < pickle.storage_bytes.size(); ++i) {
    layout.AddPayload(absl::StrCat("archive/data/", i), pickle.storage_bytes[i],
                      alignment);
  }
  layout.Add("archive/version", "3\n");
  layout.bytes_ = layout.at_;
  for (const Entry& entry : layout.entries_) {
    layout.bytes_ += static_cast<int64_t>(CentralHeader(entry, 0).size());
  }
  layout.bytes_ += zip::kEnd64Bytes + zip::kEnd64LocatorBytes + zip::kEndBytes;
  return layout;
}

std::vector<ArchivePiece> ArchiveLayout::Frame(
    absl::Span<const uint32_t> crcs) const {
  FSDP_CHECK(crcs.size() == payloads_.size());
  std::vector<ArchivePiece> pieces(1);
  std::string directory;
  size_t payload = 0;
  for (const Entry& entry : entries_) {
    absl::StrAppend(&pieces.back().bytes, LocalHeader(entry));
    uint32_t crc = 0;
    if (entry.is_payload) {
      const ArchivePayload& place = payloads_[payload];
      crc = crcs[payload++];
      pieces.push_back({place.offset + place.bytes, ""});
    } else {
      crc = Crc32(entry.content);
      absl::StrAppend(&pieces.back().bytes, entry.content);
    }
    absl::StrAppend(&pieces.back().bytes, Descriptor(entry, crc));
    absl::StrAppend(&directory, CentralHeader(entry, crc));
  }
  absl::StrAppend(&pieces.back().bytes, directory,
                  Ends(at_, static_cast<int64_t>(directory.size())));
  return pieces;
}

void ArchiveLayout::Add(std::string name, std::string content) {
  Entry entry;
  entry.bytes = static_cast<int64_t>(content.size());
  entry.name = std::move(name);
  entry.content = std::move(content);
  Place(std::move(entry), kMinAlignment);
}

void ArchiveLayout::AddPayload(std::string name, int64_t bytes,
                               int64_t alignment) {
  Entry entry;
  entry.bytes = bytes;
  entry.name = std::move(name);
  entry.is_payload = true;
  Place(std::move(entry), alignment);
}

void ArchiveLayout::Place(Entry entry, int64_t alignment) {
  entry.header = at_;
  const auto unpadded = at_ + static_cast<int64_t>(LocalHeader(entry).size());
  entry.padding = (alignment - unpadded % alignment) % alignment;
  const int64_t begin = unpadded + entry.padding;
  if (entry.is_payload) payloads_.push_back({begin, entry.bytes});
  at_ = begin + entry.bytes + static_cast<int64_t>(Descriptor(entry, 0).size());
  entries_.push_back(std::move(entry));
}

// CRC and sizes stand in the descriptor.
std::string ArchiveLayout::LocalHeader(const Entry& entry) {
  constexpr char kPaddingId[] = "FB";
  const std::string extra = Extra64(entry.bytes, entry.header);
  const uint16_t flags =
      zip::kUtf8Flag | (entry.bytes > 0 ? zip::kDescriptorFlag : 0);
  std::string header;
  zip::Put(header, zip::kLocalHeader, 4);
  zip::Put(header, 0, 2);  // version
  zip::Put(header, flags, 2);
  zip::Put(header, 0, 2);  // stored
  zip::Put(header, 0, 4);  // time and date
  header.append(12, '\0');
  zip::Put(header, entry.name.size(), 2);
  zip::Put(header, extra.size() + 4 + entry.padding, 2);
  absl::StrAppend(&header, entry.name, extra, kPaddingId);
  zip::Put(header, entry.padding, 2);
  header.append(static_cast<size_t>(entry.padding), 'Z');
  return header;
}

std::string ArchiveLayout::Descriptor(const Entry& entry, uint32_t crc) {
  std::string descriptor;
  if (entry.bytes == 0) return descriptor;
  const int size_bytes = IsLarge(entry.bytes) || IsLarge(entry.header) ? 8 : 4;
  zip::Put(descriptor, zip::kDescriptor, 4);
  zip::Put(descriptor, crc, 4);
  zip::Put(descriptor, entry.bytes, size_bytes);
  zip::Put(descriptor, entry.bytes, size_bytes);
  return descriptor;
}

std::string ArchiveLayout::CentralHeader(const Entry& entry, uint32_t crc) {
  const std::string extra = Extra64(entry.bytes, entry.header);
  const uint16_t flags =
      zip::kUtf8Flag | (entry.bytes > 0 ? zip::kDescriptorFlag : 0);
  const int64_t size = IsLarge(entry.bytes) ? zip::kIn64 : entry.bytes;
  std::string header;
  zip::Put(header, zip::kCentralHeader, 4);
  zip::Put(header, 0, 4);  // versions
  zip::Put(header, flags, 2);
  zip::Put(header, 0, 2);  // stored
  zip::Put(header, 0, 4);  // time and date
  zip::Put(header, crc, 4);
  zip::Put(header, size, 4);
  zip::Put(header, size, 4);
  zip::Put(header, entry.name.size(), 2);
  zip::Put(header, extra.size(), 2);
  zip::Put(header, 0, 2);  // comment
  zip::Put(header, 0, 8);  // disk, attributes
  zip::Put(header, IsLarge(entry.header) ? zip::kIn64 : entry.header, 4);
  absl::StrAppend(&header, entry.name, extra);
  return header;
}

std::string ArchiveLayout::Ends(int64_t directory_at,
                                int64_t directory_bytes) const {
  const uint64_t count = entries_.size();
  std::string end;
  zip::Put(end, zip::kEnd64, 4);
  zip::Put(end, zip::kEnd64Bytes - 12, 8);
  zip::Put(end, 0x031e, 2);  // made by: Unix, 3.0
  zip::Put(end, 45, 2);      // to read: 4.5
  zip::Put(end, 0, 8);       // disks
  zip::Put(end, count, 8);
  zip::Put(end, count, 8);
  zip::Put(end, directory_bytes, 8);
  zip::Put(end, directory_at, 8);
  zip::Put(end, zip::kEnd64Locator, 4);
  zip::Put(end, 0, 4);
  zip::Put(end, directory_at + directory_bytes, 8);
  zip::Put(end, 1, 4);  // disks
  zip::Put(end, zip::kEnd, 4);
  zip::Put(end, 0, 4);  // disks
  const uint64_t short_count =
      count < zip::kCountIn64 ? count : zip::kCountIn64;
  zip::Put(end, short_count, 2);
  zip::Put(end, short_count, 2);
  zip::Put(end, IsLarge(directory_bytes) ? zip::kIn64 : directory_bytes, 4);
  zip::Put(end, IsLarge(directory_at) ? zip::kIn64 : directory_at, 4);
  zip::Put(end, 0, 2);  // comment
  return end;
}

}  // namespace fsdp::checkpoint
