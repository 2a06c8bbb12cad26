// The memory that the ranks of a model share: segments as
// comm/host/shared_segment.h knows them, without the kernel.
#ifndef TESTING_INTERLEAVINGS_ARENA_H_
#define TESTING_INTERLEAVINGS_ARENA_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::interleavings {

// Every rank maps all of it at its own address, as processes do. A place is an
// offset, the same for all ranks. Nothing that has been given back is handed
// out again before Reset().
class Arena {
 public:
  static constexpr int kMaxRanks = 4;
  static constexpr int kFirstPid = 1000;

  Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Makes all of it zeros, as it was at first.
  void Reset();

  struct Place {
    int rank;  // whose mapping it is in
    uint64_t offset;
  };
  // Returns none outside of this memory.
  std::optional<Place> Find(uintptr_t address) const {
    const uintptr_t distance = address - base_;
    if (distance >= kMaxRanks * kMappingBytes) return std::nullopt;
    return Place{static_cast<int>(distance / kMappingBytes),
                 distance % kMappingBytes};
  }
  // Is told of all writes, whose bytes Reset() makes zeros.
  void Touch(uint64_t offset, int64_t bytes);

  struct Segment {
    int creator;
    uint64_t offset;
    int64_t bytes;
    int mappings[kMaxRanks];
    int descriptors[kMaxRanks];  // open ones
  };
  // Returns the number of a new segment, mapped and open in `rank`.
  int Create(int rank, int64_t bytes);
  Segment* segment(int number);
  // Returns the segment around an offset, mapped by anybody or not, or null.
  const Segment* Around(uint64_t offset) const;
  char* Data(int rank, const Segment& segment) const;

  // Names what is at these bytes, for messages and for places in code.
  void Name(uint64_t offset, int64_t bytes, std::string name);
  // Returns "arrived"; the full name has the rank that created the segment.
  std::string NameOf(uint64_t offset) const;
  std::string FullNameOf(uint64_t offset) const;

 private:
  static constexpr uint64_t kRankBytes = 16 << 20;  // that a rank can create
  static constexpr uint64_t kMappingBytes = kMaxRanks * kRankBytes;
  static constexpr uint64_t kPage = 4096;

  struct Named {
    uint64_t end;
    std::string name;
  };

  char* At(uint64_t distance) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<char*>(base_ + distance);
  }

  int descriptor_;
  uintptr_t base_;
  uint64_t next_[kMaxRanks];
  std::vector<Segment> segments_;
  std::vector<bool> is_dirty_;  // by page
  std::vector<uint64_t> dirty_;
  std::map<uint64_t, Named> names_;  // by begin
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_ARENA_H_
