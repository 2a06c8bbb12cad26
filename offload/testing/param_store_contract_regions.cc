// The part of the contract about regions, arguments, threads and counting.
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"
#include "offload/testing/param_store_contract.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST_P(ParamStoreContract, RefusesRegionsThatAreNotThere) {
  const auto store = Make(4096);
  std::string bytes(1, '?');
  const auto not_found =
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("'blocks.3, exp_avg'"));
  const std::string name = "blocks.3, exp_avg";
  EXPECT_THAT(store->Erase(name), not_found);
  EXPECT_THAT(store->Size(name), not_found);
  EXPECT_THAT(store->Write(name, 0, bytes), not_found);
  EXPECT_THAT(store->Read(name, 0, absl::MakeSpan(bytes)), not_found);
  ASSERT_OK(store->Create(name, 1));
  ASSERT_OK(store->Erase(name));
  EXPECT_THAT(store->Size(name), not_found);
  EXPECT_THAT(store->Read(name, 0, absl::MakeSpan(bytes)), not_found);
}

TEST_P(ParamStoreContract, RefusesBytesOutsideOfARegion) {
  const auto store = Make(4096);
  ASSERT_OK(store->Create("region", 10));
  ASSERT_OK(WriteNow(*store, "region", 0, "0123456789"));
  for (const auto& [offset, size] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 11}, {10, 1}, {11, 0}, {-1, 1}, {kMax, 1}, {kMax, 0}}) {
    std::string bytes(size, '?');
    const auto out_of_range =
        StatusIs(absl::StatusCode::kOutOfRange,
                 AllOf(HasSubstr("'region'"), HasSubstr("of 10")));
    EXPECT_THAT(store->Write("region", offset, bytes), out_of_range);
    EXPECT_THAT(store->Read("region", offset, absl::MakeSpan(bytes)),
                out_of_range);
  }
  EXPECT_EQ(*ReadNow(*store, "region", 0, 10), "0123456789");
}

TEST_P(ParamStoreContract, RefusesRegionsThatCannotBe) {
  const auto store = Make(4096);
  EXPECT_THAT(store->Create("negative", -1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'negative'"), HasSubstr("-1"))));
  EXPECT_THAT(store->Create("", 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("name")));
  EXPECT_THAT(store->Create(std::string(kMaxNameBytes + 1, 'x'), 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("256")));
  ASSERT_OK(store->Create(std::string(kMaxNameBytes, 'x'), 1));
  ASSERT_OK(store->Create(std::string("\0\n\xff", 3), 0));
  EXPECT_THAT(store->Create(std::string(kMaxNameBytes, 'x'), 2),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("xxx")));
  EXPECT_EQ(*store->Size(std::string(kMaxNameBytes, 'x')), 1);
}

TEST_P(ParamStoreContract, RefusesMoreThanItsCapacity) {
  const auto store = Make(int64_t{3} * 4096);
  ASSERT_OK(store->Create("first", 4097));
  EXPECT_THAT(store->Create("second", 4097),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("'second'"), HasSubstr("8192"),
                             HasSubstr("4096"))));
  ASSERT_OK(store->Create("second", 4096));
  ASSERT_OK(store->Create("nothing", 0));
  ASSERT_OK(WriteNow(*store, "first", 0, Pattern(1, 4097)));
  ASSERT_OK(WriteNow(*store, "second", 0, Pattern(2, 4096)));
  EXPECT_EQ(*ReadNow(*store, "first", 0, 4097), Pattern(1, 4097));
  EXPECT_EQ(*ReadNow(*store, "second", 0, 4096), Pattern(2, 4096));
}

TEST_P(ParamStoreContract, UsesTheSpaceOfErasedRegionsAgain) {
  constexpr int64_t kSize = int64_t{3} * 4096;
  const auto store = Make(3 * kSize);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 3; ++i) {
      const std::string name = absl::StrCat("round ", round, ", ", i);
      ASSERT_OK(store->Create(name, kSize - i));
      ASSERT_OK(WriteNow(*store, name, 0, Pattern(round + i, kSize - i)));
    }
    EXPECT_EQ(store->Stats().used_bytes, 3 * kSize);
    for (int i = 2; i >= 0; --i) {
      const std::string name = absl::StrCat("round ", round, ", ", i);
      EXPECT_EQ(*ReadNow(*store, name, 0, kSize - i),
                Pattern(round + i, kSize - i));
      ASSERT_OK(store->Erase(name));
    }
    EXPECT_EQ(store->Stats().used_bytes, 0);
  }
  ASSERT_OK(store->Create("all", 3 * kSize));
}

TEST_P(ParamStoreContract, ARegionOfAnErasedNameIsNew) {
  const auto store = Make(1 << 20);
  ASSERT_OK(store->Create("region", 5000));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 5000)));
  ASSERT_OK(store->Create("neighbour", 5000));
  ASSERT_OK(WriteNow(*store, "neighbour", 0, Pattern(2, 5000)));
  ASSERT_OK(store->Erase("region"));
  ASSERT_OK(store->Create("region", 70001));
  EXPECT_EQ(*store->Size("region"), 70001);
  EXPECT_EQ(*ReadNow(*store, "region", 0, 70001), std::string(70001, '\0'));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, 70001)));
  EXPECT_EQ(*ReadNow(*store, "neighbour", 0, 5000), Pattern(2, 5000));
  EXPECT_EQ(*ReadNow(*store, "region", 0, 70001), Pattern(3, 70001));
}

TEST_P(ParamStoreContract, ServesManyThreads) {
  constexpr int kThreads = 5;
  constexpr int kRounds = 20;
  constexpr int64_t kSize = 100003;
  // A store that keeps its commits frees what they have with the next one.
  const auto store = Make((kThreads * kRounds + 1) * StoredBytes(kSize));
  ASSERT_OK(store->Create("common", kSize));
  ASSERT_OK(WriteNow(*store, "common", 0, Pattern(99, kSize)));
  const auto work = [&](int thread) {
    const std::string name = absl::StrCat("of thread ", thread);
    std::mt19937 random(thread);
    for (int round = 0; round < kRounds; ++round) {
      ASSERT_OK(store->Create(name, kSize));
      const auto offset = static_cast<int64_t>(random() % kSize);
      const std::string bytes = Pattern(thread * 100 + round, kSize - offset);
      ASSERT_OK(WriteNow(*store, name, offset, bytes));
      ASSERT_EQ(*ReadNow(*store, name, offset, kSize - offset), bytes);
      ASSERT_EQ(*ReadNow(*store, "common", 0, kSize), Pattern(99, kSize));
      if (round % 5 == 0) {
        ASSERT_OK(Finish(store->Flush()));
      }
      ASSERT_GE(store->Stats().used_bytes, 2 * StoredBytes(kSize));
      ASSERT_OK(store->Erase(name));
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(Finish(store->Flush()));
  EXPECT_EQ(store->Stats().used_bytes, StoredBytes(kSize));
}

TEST_P(ParamStoreContract, CountsWhatItMoves) {
  const auto store = Make(int64_t{10} * 4096);
  EXPECT_EQ(store->Stats().capacity_bytes, 10 * 4096);
  ASSERT_OK(store->Create("first", 4097));
  ASSERT_OK(store->Create("second", 4096));
  EXPECT_EQ(store->Stats().used_bytes, 3 * 4096);
  ASSERT_OK(store->Erase("second"));
  EXPECT_EQ(store->Stats().used_bytes, 2 * 4096);
  EXPECT_EQ(store->Stats().peak_used_bytes, 3 * 4096);
  ASSERT_OK(WriteNow(*store, "first", 0, Pattern(1, 4097)));
  ASSERT_OK(WriteNow(*store, "first", 5, Pattern(1, 7)));
  ASSERT_OK(ReadNow(*store, "first", 4000, 97));
  const StoreStats stats = store->Stats();
  EXPECT_EQ(stats.writes.operations, 2);
  EXPECT_EQ(stats.writes.bytes, 4104);
  EXPECT_GT(stats.writes.busy_seconds, 0);
  EXPECT_EQ(stats.reads.operations, 1);
  EXPECT_EQ(stats.reads.bytes, 97);
  EXPECT_GT(stats.reads.busy_seconds, 0);
  EXPECT_THAT(store->Describe(), HasSubstr("40960"));
}

}  // namespace
}  // namespace fsdp::offload::testing
