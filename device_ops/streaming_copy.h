// Copies past the caches, of what nobody reads again soon.
#ifndef DEVICE_OPS_STREAMING_COPY_H_
#define DEVICE_OPS_STREAMING_COPY_H_

#include <cstdint>

namespace fsdp::device_ops {

// As memcpy(), by the calling thread. On x86-64 the stores do not read what
// they overwrite first, which saves a third of the memory traffic, and leave
// in the caches what is there; elsewhere it is memcpy(). Other threads and
// processes that synchronise with the caller afterwards see all of it.
void StreamingCopy(void* to, const void* from, int64_t bytes);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_STREAMING_COPY_H_
