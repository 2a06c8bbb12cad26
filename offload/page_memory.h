// Memory that starts at a page.
#ifndef OFFLOAD_PAGE_MEMORY_H_
#define OFFLOAD_PAGE_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace fsdp::offload {

// Where pools of memory come from: the machine, or a device's library that pins
// what it gives. Thread-safe.
class PageAllocator {
 public:
  virtual ~PageAllocator() = default;

  // `bytes` > 0, starting at a multiple of kPageBytes, of any content.
  // ResourceExhausted.
  virtual absl::StatusOr<char*> Allocate(int64_t bytes) = 0;
  virtual void Free(char* memory, int64_t bytes) = 0;

  // Pages of the operating system, large ones where it has them and `bytes` are
  // enough for one, which take memory once they are touched.
  static PageAllocator& System();
};

// Owns what it has allocated; `allocator` has to outlive it.
class PageMemory {
 public:
  PageMemory() = default;
  // `bytes` >= 0.
  static absl::StatusOr<PageMemory> Allocate(PageAllocator& allocator,
                                             int64_t bytes);
  PageMemory(PageMemory&& other) noexcept;
  PageMemory& operator=(PageMemory&& other) noexcept;
  ~PageMemory();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  PageAllocator* allocator_ = nullptr;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_PAGE_MEMORY_H_
