#include "offload/testing/param_store_contract.h"

#include <iostream>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
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

TEST_P(ParamStoreContract, ReadsZerosUntilWritten) {
  const auto store = Make(kMiB);
  ASSERT_OK(store->Create("old", kMiB));
  ASSERT_OK(WriteNow(*store, "old", 0, Pattern(1, kMiB)));
  ASSERT_OK(store->Erase("old"));
  ASSERT_OK(store->Create("new", kMiB));
  EXPECT_OK(Same(ReadNow(*store, "new", 0, kMiB), std::string(kMiB, '\0')));
  ASSERT_OK(WriteNow(*store, "new", 4099, "some"));
  std::string wanted(10007, '\0');
  wanted.replace(4099, 4, "some");
  EXPECT_OK(Same(ReadNow(*store, "new", 0, 10007), wanted));
}

TEST_P(ParamStoreContract, MovesRangesOfAnyOffsetAndLength) {
  constexpr int64_t kSize = 3 * kMiB + 17;
  const auto store = Make(StoredBytes(kSize));
  ASSERT_OK(store->Create("region", kSize));
  std::string model(kSize, '\0');
  std::mt19937 random(1);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  for (int round = 0; round < 60; ++round) {
    const int64_t offset = below(kSize);
    const int64_t size =
        std::min(kSize - offset, below(round % 2 == 0 ? 9000 : 2 * kMiB));
    const std::string bytes = Pattern(round, size);
    ASSERT_OK(WriteNow(*store, "region", offset, bytes));
    model.replace(offset, size, bytes);
    const int64_t from = below(kSize);
    const int64_t wanted = std::min(kSize - from, below(kMiB));
    ASSERT_OK(Same(ReadNow(*store, "region", from, wanted),
                   model.substr(from, wanted)));
  }
  EXPECT_OK(Same(ReadNow(*store, "region", 0, kSize), model));
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

}  // namespace
}  // namespace fsdp::offload::testing
