// Memory of the host that a device can copy while the host goes on, and copies
// that bypass caches.
#ifndef DEVICE_OPS_PAGE_LOCK_H_
#define DEVICE_OPS_PAGE_LOCK_H_

#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::device_ops {

// Locks the pages of [memory, memory + bytes) for every device of the kind of
// `device`. `memory` begins a page, and nobody has locked the range. Returns
// false, and does nothing, if nothing that is linked can do so;
// //device_ops/cuda can for CUDA. It is an operator of LibTorch's dispatcher
// (libtorch_fsdp::lock_pages_), so that other devices can join. Errors are
// c10::Error, for example because the machine has no more memory to lock.
bool LockPages(char* memory, int64_t bytes, c10::Device device);

// Undoes LockPages(), once no copy is under way.
void UnlockPages(char* memory, int64_t bytes, c10::Device device);

// Copies like memcpy() on the calling thread, for bytes that nobody reads soon.
// On x86-64 the stores do not first read what they overwrite, which saves a
// third of the memory traffic, and leave the caches' content; elsewhere it is
// memcpy(). Threads and processes that synchronise with the caller afterwards
// see all of it.
void StreamingCopy(void* to, const void* from, int64_t bytes);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PAGE_LOCK_H_
