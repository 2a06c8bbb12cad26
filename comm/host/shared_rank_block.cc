#include "comm/host/shared_rank_block.h"

#include <cstring>
#include <string>

#include "comm/call.h"

namespace fsdp::comm {

// Compared as bytes.
static_assert(sizeof(CallImage) == 8 + 8 + 16 + 32 + 192,
              "no padding between the members");

CallImage ImageOf(const Call& call) {
  CallImage image;
  image.collective = static_cast<int64_t>(call.collective);
  image.count = call.count;
  image.dtype.Set(call.dtype);
  image.detail.Set(call.detail);
  image.label.Set(call.label);
  return image;
}

Call CallOf(const CallImage& image) {
  return {static_cast<Collective>(image.collective), image.label.ToString(),
          image.dtype.ToString(), image.count, image.detail.ToString()};
}

bool operator==(const CallImage& a, const CallImage& b) {
  return std::memcmp(&a, &b, sizeof(CallImage)) == 0;
}

}  // namespace fsdp::comm
