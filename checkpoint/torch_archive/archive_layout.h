// Lays out what torch.load() reads, before the bytes of its tensors are there.
#ifndef CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_LAYOUT_H_
#define CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {

// Where a tensor's bytes belong: row-major, from the zip's first byte.
struct ArchivePayload {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// Bytes that are no tensor's, from the zip's first byte.
struct ArchivePiece {
  int64_t offset = 0;
  std::string bytes;
};

// The zip of one value: first where everything is, and when the CRCs of the
// tensors are known, what is around them. As torch.save() lays it out, entry by
// entry, so that any version of torch.load() reads it. Memory: O(tensors).
class ArchiveLayout {
 public:
  // Of the value's tensors only dtype and shape matter: each is written into a
  // storage of its own. Payloads begin at multiples of `alignment`, a power of
  // two from 64 to 4096, from where the zip does. InvalidArgument for a dtype
  // that PyTorch lacks, a shape that is none, and nesting deeper than 100.
  static absl::StatusOr<ArchiveLayout> Create(const Value& value,
                                              int64_t alignment = 64);

  // Of the whole zip.
  int64_t bytes() const { return bytes_; }
  // Of the tensors in the order in which the value has them.
  const std::vector<ArchivePayload>& payloads() const { return payloads_; }

  // All besides the payloads, by rising offset; `crcs` are the payloads'
  // (crc32.h). With the payloads they fill the zip without a gap.
  std::vector<ArchivePiece> Frame(absl::Span<const uint32_t> crcs) const;

 private:
  struct Entry {
    std::string name;
    std::string content;  // of what is no tensor's
    bool is_payload = false;
    int64_t bytes = 0;
    int64_t header = 0;
    int64_t padding = 0;  // in front of its bytes
  };

  void Add(std::string name, std::string content);
  void AddPayload(std::string name, int64_t bytes, int64_t alignment);
  void Place(Entry entry, int64_t alignment);
  static std::string LocalHeader(const Entry& entry);
  static std::string Descriptor(const Entry& entry, uint32_t crc);
  static std::string CentralHeader(const Entry& entry, uint32_t crc);
  std::string Ends(int64_t directory_at, int64_t directory_bytes) const;

  std::vector<Entry> entries_;
  std::vector<ArchivePayload> payloads_;
  int64_t at_ = 0;  // behind the last entry
  int64_t bytes_ = 0;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_LAYOUT_H_
