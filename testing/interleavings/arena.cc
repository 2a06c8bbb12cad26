#include "testing/interleavings/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::interleavings {

Arena::Arena()
    : descriptor_(memfd_create("interleavings", MFD_CLOEXEC)),
      is_dirty_(kMappingBytes / kPage) {
  FSDP_CHECK(descriptor_ >= 0);
  FSDP_CHECK(ftruncate(descriptor_, kMappingBytes) == 0);
  void* base = mmap(nullptr, kMaxRanks * kMappingBytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  FSDP_CHECK(base != MAP_FAILED);
  base_ = reinterpret_cast<uintptr_t>(base);
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    void* wanted = static_cast<char*>(base) + rank * kMappingBytes;
    FSDP_CHECK(mmap(wanted, kMappingBytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, descriptor_, 0) == wanted);
  }
  Reset();
}

Arena::~Arena() {
  munmap(At(0), kMaxRanks * kMappingBytes);
  close(descriptor_);
}

void Arena::Reset() {
  for (uint64_t page : dirty_) {
    std::memset(At(page * kPage), 0, kPage);
    is_dirty_[page] = false;
  }
  dirty_.clear();
  segments_.clear();
  names_.clear();
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    next_[rank] = static_cast<uint64_t>(rank) * kRankBytes;
  }
}

void Arena::Touch(uint64_t offset, int64_t bytes) {
  if (bytes <= 0) return;
  const uint64_t last = (offset + static_cast<uint64_t>(bytes) - 1) / kPage;
  for (uint64_t page = offset / kPage; page <= last; ++page) {
    if (is_dirty_[page]) continue;
    is_dirty_[page] = true;
    dirty_.push_back(page);
  }
}

int Arena::Create(int rank, int64_t bytes) {
  Segment segment = {rank, next_[rank], bytes, {}, {}};
  const auto pages =
      std::max<uint64_t>(1, (static_cast<uint64_t>(bytes) + kPage - 1) / kPage);
  next_[rank] += pages * kPage;
  FSDP_CHECK(next_[rank] <= static_cast<uint64_t>(rank + 1) * kRankBytes);
  segment.mappings[rank] = 1;
  segment.descriptors[rank] = 1;
  segments_.push_back(segment);
  return static_cast<int>(segments_.size()) - 1;
}

Arena::Segment* Arena::segment(int number) {
  const bool is_there =
      number >= 0 && number < static_cast<int>(segments_.size());
  return is_there ? &segments_[number] : nullptr;
}

const Arena::Segment* Arena::Around(uint64_t offset) const {
  for (const Segment& segment : segments_) {
    const uint64_t size =
        std::max<uint64_t>(1, static_cast<uint64_t>(segment.bytes));
    if (offset >= segment.offset && offset < segment.offset + size) {
      return &segment;
    }
  }
  return nullptr;
}

char* Arena::Data(int rank, const Segment& segment) const {
  return At(rank * kMappingBytes + segment.offset);
}

void Arena::Name(uint64_t offset, int64_t bytes, std::string name) {
  names_[offset] = {offset + static_cast<uint64_t>(bytes), std::move(name)};
}

std::string Arena::NameOf(uint64_t offset) const {
  const auto after = names_.upper_bound(offset);
  if (after == names_.begin()) return "memory";
  const Named& named = std::prev(after)->second;
  return offset < named.end ? named.name : "memory";
}

std::string Arena::FullNameOf(uint64_t offset) const {
  const Segment* segment = Around(offset);
  if (segment == nullptr) return absl::StrCat("nothing at ", offset);
  return absl::StrCat(NameOf(offset), " of rank ", segment->creator, " +",
                      offset - segment->offset);
}

}  // namespace fsdp::interleavings
