// Memory that starts at a page.
#ifndef OFFLOAD_PAGE_MEMORY_H_
#define OFFLOAD_PAGE_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace fsdp::offload {

// Gives memory for pools: the machine's, or memory that a device's library
// pins. Thread-safe.
class PageAllocator {
 public:
  virtual ~PageAllocator() = default;

  // Returns `bytes` > 0 of uninitialised memory that starts at a multiple of
  // kPageBytes. ResourceExhausted.
  virtual absl::StatusOr<char*> Allocate(int64_t bytes) = 0;
  virtual void Free(char* memory, int64_t bytes) = 0;

  // Returns pages of the operating system, which take memory once they are
  // touched. They are large pages if it has them and `bytes` fill one.
  static PageAllocator& System();
};

// Owns memory. `allocator` must outlive it.
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
