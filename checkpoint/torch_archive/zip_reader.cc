#include "checkpoint/torch_archive/zip_reader.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/zip_format.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kWindowBytes = 4096;
// Of millions of tensors.
constexpr int64_t kMaxDirectoryBytes = int64_t{1} << 30;

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("zip: ", why));
}

absl::Status BadEntry(absl::string_view name, absl::string_view why) {
  return Bad(absl::StrCat("entry \"", absl::CHexEscape(name), "\" ", why));
}

// A field of a zip as an offset or size; those of 64 bits may be nonsense.
bool FitsIn(uint64_t value, int64_t limit) {
  return value <= static_cast<uint64_t>(limit);
}

// The sizes and the place that stand in the extra field instead: those of
// which the header has kIn64, in this order.
absl::Status TakeExtra64(absl::string_view extra, uint64_t* const (&fields)[3],
                         absl::string_view name) {
  while (extra.size() >= 4) {
    const uint64_t id = zip::Get(extra, 0, 2);
    const uint64_t size = zip::Get(extra, 2, 2);
    if (size > extra.size() - 4) break;
    absl::string_view data = extra.substr(4, size);
    extra.remove_prefix(4 + size);
    if (id != zip::kExtra64) continue;
    for (uint64_t* const field : fields) {
      if (*field != zip::kIn64) continue;
      if (data.size() < 8) return BadEntry(name, "lacks its sizes of 64 bits");
      *field = zip::Get(data, 0, 8);
      data.remove_prefix(8);
    }
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ZipReader> ZipReader::Open(ReadAt read, int64_t offset,
                                          int64_t length) {
  int64_t end = 0;
  if (offset < 0 || length < zip::kEndBytes ||
      __builtin_add_overflow(offset, length, &end)) {
    return Bad(absl::StrCat(length, " bytes at ", offset,
                            " of the file cannot be a zip"));
  }
  ZipReader reader(std::move(read), offset, length);
  FSDP_ASSIGN_OR_RETURN(const Directory directory, reader.FindDirectory());
  FSDP_RETURN_IF_ERROR(reader.ReadDirectory(directory));
  FSDP_RETURN_IF_ERROR(reader.CheckPlaces(directory.at));
  return reader;
}

const ZipEntry* ZipReader::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

absl::StatusOr<int64_t> ZipReader::PayloadOffset(const ZipEntry& entry) {
  FSDP_ASSIGN_OR_RETURN(const std::string header,
                        Bytes(entry.header, zip::kLocalHeaderBytes));
  if (zip::Get(header, 0, 4) != zip::kLocalHeader) {
    return BadEntry(entry.name, "has no header where the directory says");
  }
  const auto name_bytes = static_cast<int64_t>(zip::Get(header, 26, 2));
  const auto extra_bytes = static_cast<int64_t>(zip::Get(header, 28, 2));
  const int64_t begin =
      entry.header + zip::kLocalHeaderBytes + name_bytes + extra_bytes;
  if (name_bytes != static_cast<int64_t>(entry.name.size()) ||
      begin > entry.limit || entry.bytes > entry.limit - begin) {
    return BadEntry(entry.name, "has another header than the directory says");
  }
  return offset_ + begin;
}

absl::StatusOr<std::string> ZipReader::Read(const ZipEntry& entry,
                                            int64_t max_bytes) {
  if (entry.bytes > max_bytes) {
    return BadEntry(entry.name, absl::StrCat("has ", entry.bytes, " bytes; ",
                                             max_bytes, " are read"));
  }
  FSDP_ASSIGN_OR_RETURN(const int64_t begin, PayloadOffset(entry));
  FSDP_ASSIGN_OR_RETURN(std::string bytes, Bytes(begin - offset_, entry.bytes));
  if (entry.crc != 0 && Crc32(bytes) != entry.crc) {
    return BadEntry(entry.name, "has another CRC32 than was written");
  }
  return bytes;
}

absl::StatusOr<ZipReader::Directory> ZipReader::FindDirectory() {
  const int64_t at = length_ - zip::kEndBytes;
  FSDP_ASSIGN_OR_RETURN(const std::string end, Bytes(at, zip::kEndBytes));
  if (zip::Get(end, 0, 4) != zip::kEnd || zip::Get(end, 20, 2) != 0) {
    return Bad("does not end with its directory: is it torn off?");
  }
  if (zip::Get(end, 4, 2) != 0 || zip::Get(end, 6, 2) != 0) {
    return Bad("spans several disks");
  }
  const uint64_t count = zip::Get(end, 10, 2);
  const uint64_t bytes = zip::Get(end, 12, 4);
  const uint64_t begin = zip::Get(end, 16, 4);
  const int64_t locator_at = at - zip::kEnd64LocatorBytes;
  if (locator_at >= 0) {
    FSDP_ASSIGN_OR_RETURN(const std::string locator,
                          Bytes(locator_at, zip::kEnd64LocatorBytes));
    if (zip::Get(locator, 0, 4) == zip::kEnd64Locator) {
      if (zip::Get(locator, 8, 8) !=
          static_cast<uint64_t>(locator_at - zip::kEnd64Bytes)) {
        return Bad("its end of 64 bits is not in front of its locator");
      }
      return ReadEnd64(locator_at - zip::kEnd64Bytes);
    }
  }
  if (bytes > static_cast<uint64_t>(at) || begin != at - bytes) {
    return Bad("its directory is not in front of its end");
  }
  return Directory{static_cast<int64_t>(begin), static_cast<int64_t>(bytes),
                   static_cast<int64_t>(count)};
}

absl::StatusOr<ZipReader::Directory> ZipReader::ReadEnd64(int64_t at) {
  if (at < 0) return Bad("too short for an end of 64 bits");
  FSDP_ASSIGN_OR_RETURN(const std::string end, Bytes(at, zip::kEnd64Bytes));
  if (zip::Get(end, 0, 4) != zip::kEnd64) {
    return Bad("has no end of 64 bits where its locator says");
  }
  if (zip::Get(end, 16, 4) != 0 || zip::Get(end, 20, 4) != 0) {
    return Bad("spans several disks");
  }
  const uint64_t count = zip::Get(end, 32, 8);
  const uint64_t bytes = zip::Get(end, 40, 8);
  const uint64_t begin = zip::Get(end, 48, 8);
  if (!FitsIn(bytes, at) || begin != static_cast<uint64_t>(at) - bytes ||
      !FitsIn(count, at)) {
    return Bad("its directory is not in front of its end");
  }
  return Directory{static_cast<int64_t>(begin), static_cast<int64_t>(bytes),
                   static_cast<int64_t>(count)};
}

absl::Status ZipReader::ReadDirectory(const Directory& directory) {
  if (directory.bytes > kMaxDirectoryBytes ||
      directory.count > directory.bytes / zip::kCentralHeaderBytes) {
    return Bad(absl::StrCat("its directory of ", directory.count,
                            " entries cannot have ", directory.bytes,
                            " bytes"));
  }
  FSDP_ASSIGN_OR_RETURN(const std::string bytes,
                        Bytes(directory.at, directory.bytes));
  absl::string_view left = bytes;
  for (int64_t i = 0; i < directory.count; ++i) {
    if (left.size() < zip::kCentralHeaderBytes ||
        zip::Get(left, 0, 4) != zip::kCentralHeader) {
      return Bad(absl::StrCat("entry ", i, " of its directory is none"));
    }
    const uint64_t name_bytes = zip::Get(left, 28, 2);
    const uint64_t extra_bytes = zip::Get(left, 30, 2);
    const uint64_t whole = zip::kCentralHeaderBytes + name_bytes + extra_bytes +
                           zip::Get(left, 32, 2);
    if (whole > left.size()) return Bad("its directory is torn off");
    const absl::string_view name =
        left.substr(zip::kCentralHeaderBytes, name_bytes);
    uint64_t stored = zip::Get(left, 20, 4);
    uint64_t size = zip::Get(left, 24, 4);
    uint64_t header = zip::Get(left, 42, 4);
    FSDP_RETURN_IF_ERROR(TakeExtra64(
        left.substr(zip::kCentralHeaderBytes + name_bytes, extra_bytes),
        {&size, &stored, &header}, name));
    if ((zip::Get(left, 8, 2) & zip::kEncryptedFlag) != 0) {
      return BadEntry(name, "is encrypted: refused");
    }
    if (absl::StrContains(name, "/code/")) {
      return BadEntry(name,
                      "is code of TorchScript: save the module's state_dict() "
                      "by torch.save()");
    }
    if (zip::Get(left, 10, 2) != 0 || stored != size) {
      return BadEntry(name,
                      "is compressed: write it again by torch.save(), which "
                      "stores");
    }
    if (!FitsIn(size, length_) || !FitsIn(header, length_)) {
      return BadEntry(name, "lies outside of the zip");
    }
    entries_.push_back({std::string(name), static_cast<int64_t>(size),
                        static_cast<int64_t>(header), 0,
                        static_cast<uint32_t>(zip::Get(left, 16, 4))});
    left.remove_prefix(whole);
  }
  if (!left.empty()) return Bad("its directory has more than its entries");
  return absl::OkStatus();
}

absl::Status ZipReader::CheckPlaces(int64_t directory_at) {
  std::sort(
      entries_.begin(), entries_.end(),
      [](const ZipEntry& a, const ZipEntry& b) { return a.header < b.header; });
  for (size_t i = 0; i < entries_.size(); ++i) {
    ZipEntry& entry = entries_[i];
    entry.limit =
        i + 1 < entries_.size() ? entries_[i + 1].header : directory_at;
    const int64_t least = zip::kLocalHeaderBytes +
                          static_cast<int64_t>(entry.name.size()) + entry.bytes;
    if (entry.limit < entry.header || least > entry.limit - entry.header) {
      return BadEntry(entry.name, "overlaps with what comes behind it");
    }
    if (!by_name_.emplace(entry.name, i).second) {
      return BadEntry(entry.name, "is there twice");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ZipReader::Bytes(int64_t at, int64_t count) {
  if (at < 0 || at > length_ || count > length_ - at) {
    return Bad(absl::StrCat(count, " bytes at ", at, " lie outside of it"));
  }
  if (count > kWindowBytes) {
    std::string bytes(static_cast<size_t>(count), 0);
    FSDP_RETURN_IF_ERROR(read_(offset_ + at, absl::MakeSpan(bytes)));
    return bytes;
  }
  const auto window_bytes = static_cast<int64_t>(window_.size());
  if (at < window_at_ || at + count > window_at_ + window_bytes) {
    window_at_ = std::max<int64_t>(0, std::min(at, length_ - kWindowBytes));
    window_.resize(
        static_cast<size_t>(std::min(kWindowBytes, length_ - window_at_)));
    absl::Status read = read_(offset_ + window_at_, absl::MakeSpan(window_));
    if (!read.ok()) {
      window_.clear();
      return read;
    }
  }
  return window_.substr(static_cast<size_t>(at - window_at_),
                        static_cast<size_t>(count));
}

}  // namespace fsdp::checkpoint
