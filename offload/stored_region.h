// What a file store knows about a region: where it lies, and which bytes are to
// be found there.
#ifndef OFFLOAD_STORED_REGION_H_
#define OFFLOAD_STORED_REGION_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::offload {

// One writing of a block. Generations count them; 0: never written, zeros.
struct Version {
  uint32_t generation = 0;
  uint32_t checksum = 0;
};

// A file that is kept, or can be rolled back, has two places for each block,
// one otherwise. What the last commit (a flush that ended well) consists of is
// never written over: the first write after a commit goes to the other place.
struct Block {
  Version current;   // what a read has to find, in `place`
  Version replaced;  // what `place` held before: found again, it is stale
  Version other;     // what the other place holds
  uint8_t place = 0;
  bool committed = false;  // `current` is part of the last commit
  bool damaged = false;    // a write has failed, and none since has not

  void Commit() { committed = current.generation > 0; }
  // To the last commit; to zeros where that has none of it.
  void RollBack() {
    damaged = false;
    if (committed) return;
    if (other.generation > 0) place = static_cast<uint8_t>(1 - place);
    // Without a commit, the other place has never been written.
    current = std::exchange(other, Version());
    replaced = Version();
    Commit();
  }
};

struct StoredRegion {
  StoredRegion(std::string name, int64_t bytes, int64_t offset,
               int64_t block_bytes)
      : name(std::move(name)),
        bytes(bytes),
        offset(offset),
        block_bytes(block_bytes),
        blocks((bytes + block_bytes - 1) / block_bytes) {}

  // Of the block's own bytes: less than block_bytes at the end of the region.
  int64_t BytesOf(int64_t block) const {
    return std::min(block_bytes, bytes - block * block_bytes);
  }

  const std::string name;
  const int64_t bytes;
  const int64_t offset;  // in each of the file's places
  const int64_t block_bytes;
  std::vector<Block> blocks;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_STORED_REGION_H_
