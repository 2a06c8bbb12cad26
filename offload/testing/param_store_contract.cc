#include "offload/testing/param_store_contract.h"

#include <iostream>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "offload/page_memory.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {

std::ostream& operator<<(std::ostream& out, const StoreUnderTest& store) {
  return out << store.name;
}

std::string StoreName(const ::testing::TestParamInfo<StoreUnderTest>& info) {
  return info.param.name;
}

std::unique_ptr<ParamStore> ParamStoreContract::Make(int64_t capacity) {
  absl::StatusOr<std::unique_ptr<ParamStore>> store = GetParam().make(capacity);
  if (!store.ok()) std::cerr << store.status() << std::endl;
  return std::move(store).value();
}

namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kSizes[] = {0,     1,     4095,     4096,         4097,
                              10007, 65536, kMiB + 7, 5 * kMiB + 13};

// Compares without printing megabytes.
absl::Status Same(absl::StatusOr<std::string> found, absl::string_view wanted) {
  FSDP_RETURN_IF_ERROR(found.status());
  if (found->size() != wanted.size()) {
    return absl::InternalError(
        absl::StrCat(found->size(), " bytes instead of ", wanted.size()));
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if ((*found)[i] == wanted[i]) continue;
    return absl::InternalError(
        absl::StrCat("byte ", i, " of ", wanted.size(), " is ",
                     static_cast<uint8_t>((*found)[i]), " instead of ",
                     static_cast<uint8_t>(wanted[i])));
  }
  return absl::OkStatus();
}

TEST_P(ParamStoreContract, ReadsBackWhatWasWritten) {
  const auto store = Make(16 * kMiB);
  for (const int64_t size : kSizes) {
    const std::string name = absl::StrCat("region of ", size);
    ASSERT_OK(store->Create(name, size));
    EXPECT_EQ(*store->Size(name), size);
    ASSERT_OK(WriteNow(*store, name, 0, Pattern(size, size)));
  }
  for (const int64_t size : kSizes) {
    const std::string name = absl::StrCat("region of ", size);
    EXPECT_OK(Same(ReadNow(*store, name, 0, size), Pattern(size, size)));
  }
}

// Tests the fast path, which takes aligned memory, and memory beside it.
TEST_P(ParamStoreContract, MovesPagesOfMemory) {
  constexpr int64_t kSize = 2 * kMiB + 4096;
  const auto store = Make(2 * kSize);
  ASSERT_OK_AND_ASSIGN(
      const PageMemory memory,
      PageMemory::Allocate(PageAllocator::System(), kSize + 1));
  for (const int64_t shift : {0, 1}) {
    const std::string name = absl::StrCat("at ", shift);
    ASSERT_OK(store->Create(name, kSize));
    const auto span = absl::MakeSpan(memory.data() + shift, kSize);
    Pattern(shift, kSize).copy(span.data(), kSize);
    ASSERT_OK(Finish(store->Write(name, 0, span)));
    std::fill(span.begin(), span.end(), '?');
    ASSERT_OK(Finish(store->Read(name, 0, span)));
    EXPECT_OK(Same(std::string(span.data(), kSize), Pattern(shift, kSize)));
    ASSERT_OK(Finish(store->Read(name, 8192, span.subspan(0, 4096))));
    EXPECT_OK(Same(std::string(span.data(), 4096),
                   Pattern(shift, kSize).substr(8192, 4096)));
  }
}

TEST_P(ParamStoreContract, TransfersOfTheSameBytesTakeEffectInOrder) {
  constexpr int64_t kSize = 2 * kMiB + 11;
  const auto store = Make(StoredBytes(kSize));
  ASSERT_OK(store->Create("region", kSize));
  struct Started {
    std::string bytes;   // written, or read into
    std::string wanted;  // of a read
    std::unique_ptr<Transfer> transfer;
  };
  std::string model(kSize, '\0');
  std::vector<Started> started(150);
  std::mt19937 random(2);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  for (size_t i = 0; i < started.size(); ++i) {
    const int64_t offset = below(kSize);
    const int64_t size = std::min(kSize - offset, below(kMiB / 2));
    Started& it = started[i];
    if (random() % 2 == 0) {
      it.bytes = Pattern(static_cast<int64_t>(i), size);
      model.replace(offset, size, it.bytes);
      ASSERT_OK_AND_ASSIGN(it.transfer,
                           store->Write("region", offset, it.bytes));
    } else {
      it.bytes.assign(size, '?');
      it.wanted = model.substr(offset, size);
      ASSERT_OK_AND_ASSIGN(
          it.transfer, store->Read("region", offset, absl::MakeSpan(it.bytes)));
    }
  }
  for (Started& it : started) {
    ASSERT_OK(it.transfer->Wait(absl::Now() + absl::Seconds(60)));
    if (!it.wanted.empty()) {
      ASSERT_OK(Same(it.bytes, it.wanted));
    }
  }
  EXPECT_OK(Same(ReadNow(*store, "region", 0, kSize), model));
}

TEST_P(ParamStoreContract, ATransferThatIsDroppedHasBeenDone) {
  const auto store = Make(kMiB);
  ASSERT_OK(store->Create("region", kMiB));
  {
    const std::string bytes = Pattern(5, kMiB);
    ASSERT_OK(store->Write("region", 0, bytes).status());
  }
  std::string found(kMiB, '?');
  ASSERT_OK(store->Read("region", 0, absl::MakeSpan(found)).status());
  EXPECT_OK(Same(found, Pattern(5, kMiB)));
}

TEST_P(ParamStoreContract, TransfersOutliveTheStore) {
  auto store = Make(4 * kMiB);
  const std::string bytes = Pattern(6, 3 * kMiB);
  std::string found(bytes.size(), '?');
  ASSERT_OK(store->Create("region", bytes.size()));
  ASSERT_OK_AND_ASSIGN(const auto write, store->Write("region", 0, bytes));
  ASSERT_OK_AND_ASSIGN(const auto read,
                       store->Read("region", 0, absl::MakeSpan(found)));
  ASSERT_OK_AND_ASSIGN(const auto flush, store->Flush());
  store.reset();
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  EXPECT_OK(write->Wait(deadline));
  EXPECT_OK(read->Wait(deadline));
  EXPECT_OK(flush->Wait(deadline));
  EXPECT_OK(Same(found, bytes));
}

TEST_P(ParamStoreContract, ADeadlineThatPassesIsNotTheEndOfTheTransfer) {
  const auto store = Make(8 * kMiB);
  const std::string bytes = Pattern(7, 8 * kMiB);
  ASSERT_OK(store->Create("region", bytes.size()));
  ASSERT_OK_AND_ASSIGN(const auto write, store->Write("region", 0, bytes));
  const absl::Status early = write->Wait(absl::InfinitePast());
  if (!early.ok()) {
    EXPECT_THAT(early, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                ::testing::HasSubstr("region")));
  }
  EXPECT_OK(write->Wait(absl::Now() + absl::Seconds(60)));
  EXPECT_OK(write->Wait(absl::InfinitePast())) << "a result is final";
  EXPECT_OK(Same(ReadNow(*store, "region", 0, bytes.size()), bytes));
}

TEST_P(ParamStoreContract, MovesNothing) {
  const auto store = Make(4096);
  ASSERT_OK(store->Create("empty", 0));
  ASSERT_OK(store->Create("region", 5));
  EXPECT_OK(WriteNow(*store, "empty", 0, ""));
  EXPECT_OK(ReadNow(*store, "empty", 0, 0));
  for (const int64_t offset : {0, 3, 5}) {
    EXPECT_OK(WriteNow(*store, "region", offset, ""));
    EXPECT_OK(ReadNow(*store, "region", offset, 0));
  }
  EXPECT_OK(Same(ReadNow(*store, "region", 0, 5), std::string(5, '\0')));
}

TEST_P(ParamStoreContract, FlushComesAfterTheWritesBeforeIt) {
  const auto store = Make(4 * kMiB);
  ASSERT_OK(Finish(store->Flush()));
  ASSERT_OK(store->Create("region", 4 * kMiB));
  const std::string first = Pattern(8, 4 * kMiB);
  const std::string second = Pattern(9, kMiB);
  ASSERT_OK_AND_ASSIGN(const auto write, store->Write("region", 0, first));
  ASSERT_OK_AND_ASSIGN(const auto flush, store->Flush());
  ASSERT_OK_AND_ASSIGN(const auto later, store->Write("region", 77, second));
  ASSERT_OK_AND_ASSIGN(const auto again, store->Flush());
  ASSERT_OK(flush->Wait(absl::Now() + absl::Seconds(60)));
  EXPECT_OK(write->Wait(absl::InfinitePast()));
  ASSERT_OK(again->Wait(absl::Now() + absl::Seconds(60)));
  EXPECT_OK(later->Wait(absl::InfinitePast()));
  std::string wanted = first;
  wanted.replace(77, second.size(), second);
  EXPECT_OK(Same(ReadNow(*store, "region", 0, wanted.size()), wanted));
}

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

// Says what a test looks at after it wants to go back: a store that can has
// gone back; the others say that they cannot, and go on.
enum class After { kRollback, kRefusal };
After RollBack(ParamStore& store) {
  const absl::Status status = store.Rollback();
  if (ParamStoreContract::GetParam().can_roll_back) {
    EXPECT_OK(status);
    return After::kRollback;
  }
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnimplemented,
                               HasSubstr(store.Describe())));
  return After::kRefusal;
}

// Compares any sequence of all there is with strings.
TEST_P(ParamStoreContract, RollbackAtAnyTimeFindsTheLastFlush) {
  struct Model {
    std::string now;
    std::string flushed;
  };
  const auto store = Make(4 << 20);
  std::map<std::string, Model> regions;
  std::mt19937 random(3);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  for (int action = 0; action < 300; ++action) {
    const std::string name = absl::StrCat("region ", random() % 5);
    const uint32_t what = random() % 100;
    if (regions.count(name) == 0) {
      const std::string zeros(random() % 60000, '\0');
      ASSERT_OK(store->Create(name, zeros.size()));
      regions[name] = {zeros, zeros};
    } else if (what < 60) {
      std::string& now = regions[name].now;
      const auto size = static_cast<int64_t>(now.size());
      const int64_t offset = what < 30 ? 0 : below(size + 1);
      const int64_t left = size - offset;
      const std::string bytes =
          Pattern(action, what < 30 ? left : below(left + 1));
      ASSERT_OK(WriteNow(*store, name, offset, bytes));
      now.replace(offset, bytes.size(), bytes);
    } else if (what < 65) {
      ASSERT_OK(store->Erase(name));
      regions.erase(name);
    } else if (what < 82) {
      ASSERT_OK(Finish(store->Flush()));
      for (auto& [_, model] : regions) model.flushed = model.now;
    } else if (RollBack(*store) == After::kRollback) {
      for (auto& [_, model] : regions) model.now = model.flushed;
    }
    for (const auto& [region, model] : regions) {
      ASSERT_EQ(*ReadNow(*store, region, 0, model.now.size()), model.now)
          << region << ", action " << action;
    }
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
