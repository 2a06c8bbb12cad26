#include "offload/offloader.h"

#include <functional>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Use = Offloader::Use;

constexpr int64_t kCapacity = 4 << 20;

std::unique_ptr<ParamStore> Host() {
  return HostStore::Make(kCapacity).value();
}

std::unique_ptr<ParamStore> File() {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = kCapacity;
  options.block_bytes = 8192;
  return FileStore::Make(options).value();
}

Fault Delayed() {
  Fault fault;
  fault.count = 1000000;
  fault.effect = Fault::Effect::kDelay;
  return fault;
}

struct StoreCase {
  const char* name;
  std::function<std::unique_ptr<ParamStore>()> make;
};

class OffloaderTest : public ::testing::TestWithParam<StoreCase> {};

// Compares with strings: entries are used, prefetched and flushed in any order,
// with memory for a part of them.
TEST_P(OffloaderTest, EntriesHaveWhatWasWrittenLast) {
  const std::vector<int64_t> sizes = {0,     1,     4095,  4096, 4097,
                                      10007, 32768, 65536, 65537};
  std::mt19937 random(7);
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  const auto offloader = Over(GetParam().make(), 128 << 10);
  std::vector<std::string> expected;
  for (size_t i = 0; i < sizes.size(); ++i) {
    ASSERT_OK(offloader->Add(0, absl::StrCat("entry ", i), sizes[i]));
    expected.emplace_back(sizes[i], '\0');
  }
  for (int turn = 0; turn < 400; ++turn) {
    const int entry = below(static_cast<int>(sizes.size()));
    std::string& bytes = expected[entry];
    switch (below(5)) {
      case 0:
        bytes = Pattern(turn, sizes[entry]);
        ASSERT_OK(Put(*offloader, entry, bytes));
        break;
      case 1: {
        ASSERT_OK_AND_ASSIGN(const absl::Span<char> memory,
                             offloader->Acquire(entry, Use::kUpdate));
        ASSERT_EQ(std::string(memory.begin(), memory.end()), bytes);
        for (size_t i = 0; i < bytes.size(); i += 3) bytes[i] = memory[i] += 1;
        offloader->Release(entry);
        break;
      }
      case 2:
        offloader->Prefetch(entry);
        break;
      case 3:
        if (below(10) == 0) {
          ASSERT_OK(offloader->Flush(0));
        }
        break;
      default:
        ASSERT_OK_AND_ASSIGN(const std::string got, Get(*offloader, entry));
        ASSERT_EQ(got, bytes) << "entry " << entry << ", turn " << turn;
    }
  }
  ASSERT_OK(offloader->Flush(0));
  EXPECT_LE(offloader->stats().peak_memory_bytes, 128 << 10);
  EXPECT_GT(offloader->stats().prefetched, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Stores, OffloaderTest,
    ::testing::Values(
        StoreCase{"Host", Host}, StoreCase{"File", File},
        StoreCase{"SlowHost", [] { return WithFaults(Host(), {Delayed()}); }},
        StoreCase{"SlowFile", [] { return WithFaults(File(), {Delayed()}); }}),
    [](const auto& info) { return info.param.name; });

TEST(OffloaderTest, WhatIsInMemoryIsNotReadAgain) {
  const auto offloader = WithEntries(Over(Host(), 3 * kPageBytes), 3, 4096);
  for (int round = 0; round < 2; ++round) {
    for (int entry = 0; entry < 3; ++entry) {
      ASSERT_OK(Get(*offloader, entry).status());
    }
  }
  EXPECT_EQ(offloader->store(0).Stats().reads.operations, 3);
  EXPECT_EQ(offloader->stats().missed, 3);
  EXPECT_EQ(offloader->stats().found, 3);
}

TEST(OffloaderTest, TheLeastRecentlyUsedGoFirst) {
  const auto offloader = WithEntries(Over(Host(), 2 * kPageBytes), 3, 4096);
  for (int entry : {0, 1, 0, 2, 0}) ASSERT_OK(Get(*offloader, entry).status());
  EXPECT_EQ(offloader->stats().missed, 3) << "1 made room for 2";
  ASSERT_OK(Get(*offloader, 1).status());
  EXPECT_EQ(offloader->stats().missed, 4);
}

TEST(OffloaderTest, PrefetchReadsAheadButDisplacesNothingThatIsNeeded) {
  const auto offloader = WithEntries(Over(Host(), 2 * kPageBytes), 3, 4096);
  ASSERT_OK(offloader->Acquire(0, Use::kRead).status());
  offloader->Prefetch(1);
  offloader->Prefetch(2);  // no room
  ASSERT_OK(Get(*offloader, 1).status());
  EXPECT_EQ(offloader->stats().prefetched, 1);
  ASSERT_OK(Get(*offloader, 2).status());
  EXPECT_EQ(offloader->stats().missed, 2) << "0 and 2";
  offloader->Release(0);
}

TEST(OffloaderTest, OfWhatWasReadAheadTheLastGoesFirst) {
  const auto offloader = WithEntries(Over(Host(), 3 * kPageBytes), 4, 4096);
  for (int entry : {0, 1, 2}) offloader->Prefetch(entry);
  ASSERT_OK(Get(*offloader, 3).status());
  for (int entry : {0, 1}) ASSERT_OK(Get(*offloader, entry).status());
  EXPECT_EQ(offloader->stats().prefetched, 2);
  EXPECT_EQ(offloader->stats().missed, 1);
}

TEST(OffloaderTest, EntriesInUseThatLeaveNoRoomAreAnErrorAndNothingIsLost) {
  const auto offloader = WithEntries(Over(Host(), 2 * kPageBytes), 3, 4096);
  ASSERT_OK(Put(*offloader, 2, Pattern(1, 4096)));
  ASSERT_OK(offloader->Acquire(0, Use::kRead).status());
  ASSERT_OK(offloader->Acquire(1, Use::kRead).status());
  EXPECT_THAT(offloader->Acquire(2, Use::kRead).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("'entry 2': it needs 4096 bytes")));
  offloader->Release(1);
  EXPECT_EQ(Get(*offloader, 2).value(), Pattern(1, 4096));
  offloader->Release(0);
}

TEST(OffloaderTest, AFailedWriteIsReportedAndTriedAgainByFlush) {
  Fault fault;
  fault.operation = Fault::Operation::kWrite;
  fault.count = 2;
  for (const auto effect : {Fault::Effect::kFail, Fault::Effect::kShorten,
                            Fault::Effect::kRefuse}) {
    fault.effect = effect;
    const auto offloader =
        WithEntries(Over(WithFaults(Host(), {fault}), 2 * kPageBytes), 2, 4096);
    ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
    EXPECT_THAT(offloader->Flush(0), StatusIs(absl::StatusCode::kUnavailable,
                                              HasSubstr("injected failure")));
    EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
    absl::Status flushed = offloader->Flush(0);
    if (!flushed.ok()) flushed = offloader->Flush(0);
    EXPECT_OK(flushed);
    // The entry goes out of memory and comes back from the store.
    ASSERT_OK(offloader->Add(0, "large", 2 * kPageBytes).status());
    ASSERT_OK(Get(*offloader, 2).status());
    EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
  }
}

TEST(OffloaderTest, BytesThatCouldNotBeWrittenStayInMemory) {
  Fault fault;
  fault.operation = Fault::Operation::kWrite;
  fault.region = "entry 0";
  const auto offloader =
      WithEntries(Over(WithFaults(Host(), {fault}), kPageBytes), 2, 4096);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  EXPECT_THAT(
      Get(*offloader, 1).status(),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("injected failure")));
  EXPECT_THAT(
      Get(*offloader, 1).status(),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("entry")));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
  ASSERT_OK(offloader->Flush(0));
  ASSERT_OK(Get(*offloader, 1).status());
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
}

TEST(OffloaderTest, AFailedReadIsReportedOnceAndMayBeTriedAgain) {
  Fault fault;
  fault.operation = Fault::Operation::kRead;
  for (const bool ahead : {false, true}) {
    const auto offloader =
        WithEntries(Over(WithFaults(Host(), {fault}), kPageBytes), 1, 4096);
    if (ahead) offloader->Prefetch(0);
    EXPECT_THAT(Get(*offloader, 0).status(),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("injected failure")));
    EXPECT_OK(Get(*offloader, 0).status());
  }
}

TEST(OffloaderTest, WhatIsOverwrittenNeedsNotHaveBeenReadable) {
  Fault fault;
  fault.operation = Fault::Operation::kRead;
  const auto offloader =
      WithEntries(Over(WithFaults(Host(), {fault}), kPageBytes), 1, 4096);
  offloader->Prefetch(0);
  ASSERT_OK(Put(*offloader, 0, Pattern(3, 4096)));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(3, 4096));
}

TEST(OffloaderTest, AStoreThatIsTooSlowIsAnErrorAtTheDeadline) {
  Fault fault = Delayed();
  fault.operation = Fault::Operation::kRead;
  fault.delay = absl::Milliseconds(200);
  fault.count = 1;
  const auto offloader = WithEntries(
      Over(WithFaults(Host(), {fault}), kPageBytes, absl::Milliseconds(1)), 1,
      4096);
  absl::Status status = Get(*offloader, 0).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded,
                               HasSubstr("entry")));
  while (absl::IsDeadlineExceeded(status)) status = Get(*offloader, 0).status();
  EXPECT_OK(status);
}

TEST(OffloaderTest, AnEntryThatTheStoreHasNoRoomForIsRefused) {
  const auto offloader = Over(Host(), kPageBytes);
  EXPECT_THAT(
      offloader->Add(0, "large", 2 * kCapacity).status(),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("large")));
  ASSERT_OK(offloader->Add(0, "small", 1).status());
  EXPECT_THAT(offloader->Add(0, "small", 1).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("small")));
}

}  // namespace
}  // namespace fsdp::offload::testing
