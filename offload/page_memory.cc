#include "offload/page_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

// The large page of x86-64, and of arm64 with pages of 4 KiB.
constexpr int64_t kLargePage = int64_t{2} << 20;

// Unmaps what lies around `bytes` from the first large page on, and returns
// where that page begins.
char* KeepLargePages(char* mapped, int64_t mapped_bytes, int64_t bytes) {
  const auto past =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped)) % kLargePage;
  char* const data = mapped + (kLargePage - past) % kLargePage;
  const int64_t page = sysconf(_SC_PAGESIZE);
  char* const end = data + (bytes + page - 1) / page * page;
  if (data > mapped) munmap(mapped, data - mapped);
  if (mapped + mapped_bytes > end) munmap(end, mapped + mapped_bytes - end);
  return data;
}

class SystemAllocator : public PageAllocator {
 public:
  absl::StatusOr<char*> Allocate(int64_t bytes) override {
    // Disks move memory of few pages twice as fast as memory of many. But a
    // large page has to be whole, and Linux begins a mapping where it likes.
    const int64_t spare = bytes >= kLargePage ? kLargePage : 0;
    int64_t mapped_bytes = 0;
    void* mapped = MAP_FAILED;
    if (__builtin_add_overflow(bytes, spare, &mapped_bytes)) {
      errno = ENOMEM;
    } else {
      mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (mapped == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "allocate ", bytes, " bytes of memory: ", std::strerror(errno)));
    }
    char* data = static_cast<char*>(mapped);
    if (spare > 0) data = KeepLargePages(data, mapped_bytes, bytes);
    // This is a mere wish, which may be refused.
    madvise(data, bytes, MADV_HUGEPAGE);
    return data;
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
