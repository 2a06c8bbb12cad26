#include "offload/checksum.h"

#include <algorithm>

#include "util/crc32c.h"

namespace fsdp::offload {
namespace {

// The loop over three streams is faster than memory delivers in that order: we
// prefetch earlier, and from front to back.
constexpr size_t kChunk = 2048;
constexpr size_t kAhead = 4096;
constexpr size_t kLine = 64;

}  // namespace

uint32_t Crc32c(absl::string_view bytes, uint32_t before) {
  while (!bytes.empty()) {
    const size_t size = std::min(kChunk, bytes.size());
    const size_t ahead = std::min(kAhead + kChunk, bytes.size());
    for (size_t at = kAhead; at < ahead; at += kLine) {
      __builtin_prefetch(bytes.data() + at);
    }
    before = ROCKSDB_NAMESPACE::crc32c::Extend(before, bytes.data(), size);
    bytes.remove_prefix(size);
  }
  return before;
}

}  // namespace fsdp::offload
