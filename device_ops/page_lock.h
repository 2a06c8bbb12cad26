// Memory of the host that a device copies from and to while the host goes on.
#ifndef DEVICE_OPS_PAGE_LOCK_H_
#define DEVICE_OPS_PAGE_LOCK_H_

#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::device_ops {

// Keeps the pages of [memory, memory + bytes), which begin there and which
// nobody has locked, where they are, for every device of the kind of `device`.
// False, and nothing is done, on devices that nothing linked knows how to do
// that for: CUDA is by //device_ops/cuda. An operator of LibTorch's dispatcher
// (libtorch_fsdp::lock_pages_), so that other devices can join. Errors are
// c10::Error: the machine has no more memory to lock, for example.
bool LockPages(char* memory, int64_t bytes, c10::Device device);

// Ends what LockPages() did, once no copy is under way.
void UnlockPages(char* memory, int64_t bytes, c10::Device device);

// Copies past the caches, of what nobody reads again soon.

// As memcpy(), by the calling thread. On x86-64 the stores do not read what
// they overwrite first, which saves a third of the memory traffic, and leave
// in the caches what is there; elsewhere it is memcpy(). Other threads and
// processes that synchronise with the caller afterwards see all of it.
void StreamingCopy(void* to, const void* from, int64_t bytes);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PAGE_LOCK_H_
