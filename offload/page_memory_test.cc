#include "offload/page_memory.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "base/testing/status_matchers.h"

namespace fsdp::offload {
namespace {

constexpr int64_t kLargePage = int64_t{2} << 20;

PageMemory Allocate(int64_t bytes) {
  auto memory = PageMemory::Allocate(PageAllocator::System(), bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

int64_t Address(const PageMemory& memory) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data()));
}

// Returns the size of the process's address space.
int64_t MappedBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST(PageMemory, AllBytesCanBeWritten) {
  for (const int64_t bytes :
       {int64_t{1}, int64_t{4097}, kLargePage - 1, kLargePage,
        kLargePage + 4097, 5 * kLargePage - 4096}) {
    const PageMemory memory = Allocate(bytes);
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(Address(memory) % sysconf(_SC_PAGESIZE), 0);
    std::memset(memory.data(), 0x5a, bytes);
    EXPECT_EQ(memory.data()[bytes - 1], 0x5a);
  }
}

// Linux does not align these sizes by itself.
TEST(PageMemory, BeginsAtALargePageWhereItHasOne) {
  std::vector<PageMemory> memories;
  memories.reserve(8);
  for (int i = 0; i < 8; ++i) {
    memories.push_back(Allocate(kLargePage + i * int64_t{4096} + 1));
    EXPECT_EQ(Address(memories.back()) % kLargePage, 0) << i;
  }
}

TEST(PageMemory, MapsNoMoreThanItHas) {
  constexpr int kMemories = 64;
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t before = MappedBytes();
  {
    std::vector<PageMemory> memories;
    memories.reserve(kMemories);
    for (int i = 0; i < kMemories; ++i) {
      memories.push_back(Allocate(kLargePage + 1));
    }
    const int64_t mapped = MappedBytes() - before;
    EXPECT_GE(mapped, kMemories * (kLargePage + page));
    EXPECT_LT(mapped, kMemories * (kLargePage + page) + kLargePage);
  }
  EXPECT_LT(MappedBytes() - before, kLargePage);
}

TEST(PageMemory, MoreThanThereIsIsRefused) {
  for (const int64_t bytes : {std::numeric_limits<int64_t>::max(),
                              std::numeric_limits<int64_t>::max() / 2}) {
    EXPECT_THAT(
        PageMemory::Allocate(PageAllocator::System(), bytes).status(),
        ::fsdp::testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                  ::testing::HasSubstr("bytes of memory")));
  }
}

}  // namespace
}  // namespace fsdp::offload
