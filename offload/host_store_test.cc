#include "offload/host_store.h"

#include <algorithm>
#include <random>
#include <vector>

#include "base/testing/status_matchers.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/param_store_contract.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(
    Host, ParamStoreContract,
    ::testing::Values(
        StoreUnderTest{"host", [](int64_t n) { return HostStore::Make(n); }},
        StoreUnderTest{"with_rollback", &RollingHostStore,
                       /*can_roll_back=*/true}),
    StoreName);

TEST(HostStoreTest, AllocatesOnceAndGivesAllBack) {
  CountingAllocator allocator(1 << 20);
  {
    ASSERT_OK_AND_ASSIGN(const auto store,
                         HostStore::Make((1 << 20) - 7, allocator));
    for (int round = 0; round < 10; ++round) {
      ASSERT_OK(store->Create("first", 300007));
      ASSERT_OK(store->Create("second", 700001));
      ASSERT_OK(WriteNow(*store, "second", 1, Pattern(round, 700000)));
      ASSERT_OK(store->Erase("first"));
      ASSERT_OK(store->Erase("second"));
    }
    EXPECT_EQ(allocator.calls, 1);
    EXPECT_EQ(allocator.out, 1 << 20);
  }
  EXPECT_EQ(allocator.out, 0);
}

TEST(HostStoreTest, SaysWhatItsAllocatorSays) {
  CountingAllocator allocator(4096);
  EXPECT_THAT(
      HostStore::Make(4097, allocator),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no more")));
  EXPECT_THAT(HostStore::Make(-1, allocator),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  EXPECT_EQ(allocator.out, 0);
}

TEST(HostStoreTest, WithoutCapacityThereIsRoomForNothingOnly) {
  CountingAllocator allocator(4096);
  ASSERT_OK_AND_ASSIGN(const auto store, HostStore::Make(0, allocator));
  EXPECT_OK(store->Create("empty", 0));
  EXPECT_THAT(store->Create("byte", 1),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("0")));
  EXPECT_EQ(allocator.calls, 0);
}

TEST(HostStoreTest, LendsTheMemoryOfARegion) {
  ASSERT_OK_AND_ASSIGN(const auto store, HostStore::Make(1 << 20));
  ASSERT_OK(store->Create("before", 5));
  ASSERT_OK(store->Create("region", 10007));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 10007)));
  ASSERT_OK_AND_ASSIGN(const absl::Span<char> memory, store->Memory("region"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % kPageBytes, 0);
  EXPECT_EQ(std::string(memory.data(), memory.size()), Pattern(1, 10007));
  memory[10006] = '!';
  EXPECT_EQ(*ReadNow(*store, "region", 10006, 1), "!");
  EXPECT_THAT(store->Memory("other"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'other'")));
}

TEST(HostStoreTest, LendsZerosOfWhatWasNeverWrittenWhateverWasThereBefore) {
  ASSERT_OK_AND_ASSIGN(const auto store, HostStore::Make(8192));
  ASSERT_OK(store->Create("region", 5003));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 5003)));
  ASSERT_OK(store->Erase("region"));
  ASSERT_OK(store->Create("region", 5003));
  ASSERT_OK_AND_ASSIGN(const auto lent, store->Memory("region"));
  EXPECT_EQ(std::string(lent.data(), lent.size()), std::string(5003, '\0'));
}

TEST(HostStoreTest, LendsTheMemoryOfARegionToFillIt) {
  ASSERT_OK_AND_ASSIGN(const auto store, HostStore::Make(8192));
  ASSERT_OK(store->Create("region", 5003));
  ASSERT_OK_AND_ASSIGN(const auto memory, store->MemoryToFill("region"));
  const std::string pattern = Pattern(1, 5003);
  std::copy(pattern.begin(), pattern.end(), memory.begin());
  EXPECT_EQ(*ReadNow(*store, "region", 0, 5003), pattern);
  ASSERT_OK_AND_ASSIGN(const auto again, store->Memory("region"));
  EXPECT_EQ(again.data(), memory.data());
  EXPECT_EQ(std::string(again.data(), again.size()), pattern);
  EXPECT_THAT(store->MemoryToFill("other"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'other'")));
}

TEST(ExtentsTest, TakesWhereItIsTold) {
  Extents extents(10);
  EXPECT_TRUE(extents.TakeAt(4, 3));
  EXPECT_FALSE(extents.TakeAt(6, 1));
  EXPECT_FALSE(extents.TakeAt(3, 2));
  EXPECT_FALSE(extents.TakeAt(8, 3));
  EXPECT_FALSE(extents.TakeAt(-1, 1));
  EXPECT_TRUE(extents.TakeAt(7, 3));
  EXPECT_EQ(extents.Take(4), 0);
  EXPECT_EQ(extents.LargestFree(), 0);
}

// Compares with an array of bytes.
TEST(ExtentsTest, RandomPiecesNeverOverlap) {
  constexpr int64_t kCapacity = 97;
  Extents extents(kCapacity);
  std::vector<bool> taken(kCapacity);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  std::mt19937 random(1);
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 && !pieces.empty()) {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const auto [start, bytes] = pieces.back();
      pieces.pop_back();
      extents.Give(start, bytes);
      std::fill_n(taken.begin() + start, bytes, false);
    } else {
      const auto bytes = static_cast<int64_t>(1 + random() % 23);
      const std::optional<int64_t> start = extents.Take(bytes);
      const auto free = std::search_n(taken.begin(), taken.end(), bytes, false);
      ASSERT_EQ(start.has_value(), free != taken.end());
      if (!start.has_value()) continue;
      ASSERT_EQ(*start, free - taken.begin());
      std::fill_n(free, bytes, true);
      pieces.push_back({*start, bytes});
    }
    ASSERT_EQ(extents.used(), std::count(taken.begin(), taken.end(), true));
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
