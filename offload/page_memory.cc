#include "offload/page_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

class SystemAllocator : public PageAllocator {
 public:
  absl::StatusOr<char*> Allocate(int64_t bytes) override {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "allocate ", bytes, " bytes of memory: ", std::strerror(errno)));
    }
    // Disks move memory of few pages twice as fast as of many. A mere wish.
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<char*>(memory);
  }

  void Free(char* memory, int64_t bytes) override { munmap(memory, bytes); }
};

}  // namespace

PageAllocator& PageAllocator::System() {
  static SystemAllocator* const allocator = new SystemAllocator;
  return *allocator;
}

absl::StatusOr<PageMemory> PageMemory::Allocate(PageAllocator& allocator,
                                                int64_t bytes) {
  PageMemory memory;
  if (bytes == 0) return memory;
  FSDP_ASSIGN_OR_RETURN(memory.data_, allocator.Allocate(bytes));
  memory.allocator_ = &allocator;
  memory.bytes_ = bytes;
  return memory;
}

PageMemory::PageMemory(PageMemory&& other) noexcept {
  *this = std::move(other);
}

PageMemory& PageMemory::operator=(PageMemory&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PageMemory::~PageMemory() {
  if (data_ != nullptr) allocator_->Free(data_, bytes_);
}

}  // namespace fsdp::offload
