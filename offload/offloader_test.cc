#include "offload/offloader.h"

#include <iterator>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
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

std::unique_ptr<ParamStore> File(bool rollback = false) {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = kCapacity;
  options.block_bytes = 8192;
  options.rollback = rollback;
  return FileStore::Make(options).value();
}

constexpr auto kRead = Fault::Operation::kRead;
constexpr auto kWrite = Fault::Operation::kWrite;

Fault Delayed(int64_t count = 1000000) {
  return FaultOf(Fault::Operation::kAny, Fault::Effect::kDelay, 0, count);
}

Fault Failing(Fault::Operation operation) {
  return FaultOf(operation, Fault::Effect::kFail, 0);
}

// Makes an offloader with memory for `pages` over entries of a page each, in a
// store with this fault, or whose writes a gate holds.
std::unique_ptr<Offloader> Faulty(const Fault& fault, int pages, int count) {
  return WithEntries(Over(WithFaults(Host(), {fault}), pages * kPageBytes),
                     count, kPageBytes);
}
std::unique_ptr<Offloader> Held(const std::shared_ptr<Gate>& gate, int pages,
                                int count,
                                absl::Duration timeout = absl::Minutes(1)) {
  return WithEntries(
      Over(WithHeldWrites(Host(), gate), pages * kPageBytes, timeout), count,
      kPageBytes);
}

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
  for (const auto effect : {Fault::Effect::kFail, Fault::Effect::kShorten,
                            Fault::Effect::kRefuse}) {
    const auto offloader = Faulty(FaultOf(kWrite, effect, 0, 2), 2, 2);
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
  Fault fault = Failing(kWrite);
  fault.region = "entry 0";
  const auto offloader = Faulty(fault, 1, 2);
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
  for (const bool ahead : {false, true}) {
    const auto offloader = Faulty(Failing(kRead), 1, 1);
    if (ahead) offloader->Prefetch(0);
    EXPECT_THAT(Get(*offloader, 0).status(),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("injected failure")));
    EXPECT_OK(Get(*offloader, 0).status());
  }
}

TEST(OffloaderTest, WhatIsOverwrittenNeedsNotHaveBeenReadable) {
  const auto offloader = Faulty(Failing(kRead), 1, 1);
  offloader->Prefetch(0);
  ASSERT_OK(Put(*offloader, 0, Pattern(3, 4096)));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(3, 4096));
}

TEST(OffloaderTest, AStoreThatIsTooSlowIsAnErrorAtTheDeadline) {
  Fault fault = Delayed(1);
  fault.delay = absl::Milliseconds(200);
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

// Several stores behind one memory: entries that come and go, flushes and
// rollbacks of one store, and writes behind that end when a test says so.

// Compares with strings: entries of three stores are added, used, prefetched,
// removed, flushed and rolled back, with memory for a part of them.
void UseEntriesOfStores(bool slow) {
  constexpr int kStores = 3;
  constexpr int64_t kSizes[] = {0,     1,     4095,  4096, 4097,
                                10007, 32768, 65536, 65537};
  struct Model {
    int store = 0;
    std::string now;
    std::string flushed;
  };
  const auto offloader = Over(nullptr, 128 << 10);
  for (const bool is_host : {false, true, false}) {
    auto store = is_host ? Host() : File(true);
    offloader->AddStore(slow ? WithFaults(std::move(store), {Delayed()})
                             : std::move(store));
  }
  std::mt19937 random(11);
  const auto below = [&random](size_t n) {
    return static_cast<int64_t>(random() % n);
  };
  std::map<int, Model> entries;
  for (int turn = 0; turn < 1500; ++turn) {
    const int store = static_cast<int>(below(kStores));
    const int64_t what = below(100);
    if (entries.size() < 4 || what < 8) {
      const int64_t bytes = kSizes[below(std::size(kSizes))];
      ASSERT_OK_AND_ASSIGN(const int entry,
                           offloader->Add(store, absl::StrCat(turn), bytes));
      ASSERT_EQ(entries.count(entry), 0) << "a number that is in use";
      const std::string zeros(bytes, '\0');
      entries[entry] = {store, zeros, zeros};
    } else if (what < 11) {
      ASSERT_OK(offloader->Flush(store));
      for (auto& [entry, model] : entries) {
        if (model.store == store) model.flushed = model.now;
      }
    } else if (what < 14 && store != 1) {
      ASSERT_OK(offloader->Rollback(store));
      for (auto& [entry, model] : entries) {
        if (model.store == store) model.now = model.flushed;
      }
    } else {
      const auto chosen = std::next(entries.begin(), below(entries.size()));
      const int entry = chosen->first;
      std::string& bytes = chosen->second.now;
      if (what < 21) {
        ASSERT_OK(offloader->Remove(entry));
        entries.erase(chosen);
      } else if (what < 40) {
        bytes = Pattern(turn, static_cast<int64_t>(bytes.size()));
        ASSERT_OK(Put(*offloader, entry, bytes));
      } else if (what < 60) {
        ASSERT_OK_AND_ASSIGN(const absl::Span<char> memory,
                             offloader->Acquire(entry, Use::kUpdate));
        ASSERT_EQ(std::string(memory.begin(), memory.end()), bytes);
        for (size_t i = 0; i < bytes.size(); i += 3) bytes[i] = memory[i] += 1;
        offloader->Release(entry);
      } else if (what < 80) {
        offloader->Prefetch(entry);
      } else {
        ASSERT_OK_AND_ASSIGN(const std::string got, Get(*offloader, entry));
        ASSERT_EQ(got, bytes) << "entry " << entry << ", turn " << turn;
      }
    }
  }
  EXPECT_EQ(offloader->num_stores(), kStores);
  EXPECT_LE(offloader->stats().peak_memory_bytes, 128 << 10);
  EXPECT_GT(offloader->stats().prefetched, 0);
}

TEST(OffloaderStoresTest, EntriesOfAllStoresHaveWhatTheyShould) {
  for (const bool slow : {false, true}) UseEntriesOfStores(slow);
}

TEST(OffloaderStoresTest, ARegionThatIsThereGetsAnEntry) {
  auto store = Host();
  ASSERT_OK(store->Create("old", 4099));
  ASSERT_OK(WriteNow(*store, "old", 0, Pattern(1, 4099)));
  const auto offloader = Over(std::move(store), 1 << 16);
  EXPECT_THAT(offloader->Attach(0, "other", 1).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'other'")));
  EXPECT_THAT(offloader->Attach(0, "old", 4098).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::AllOf(HasSubstr("'old'"),
                                        HasSubstr("4099 bytes, not 4098"))));
  ASSERT_OK_AND_ASSIGN(const int entry, offloader->Attach(0, "old", 4099));
  EXPECT_EQ(Get(*offloader, entry).value(), Pattern(1, 4099));
  EXPECT_THAT(offloader->Attach(0, "old", 4099).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("'old'")));
  // The same name in another store is another region.
  const int other = offloader->AddStore(Host());
  ASSERT_OK(offloader->Add(other, "old", 4099).status());
  EXPECT_EQ(Get(*offloader, entry + 1).value(), std::string(4099, '\0'));
}

TEST(OffloaderStoresTest, ANumberIsFreeAgainAfterRemoval) {
  const auto offloader = WithEntries(Over(Host(), 2 * kPageBytes), 3, 4096);
  ASSERT_OK(Put(*offloader, 1, Pattern(1, 4096)));
  ASSERT_OK(offloader->Remove(1));
  EXPECT_THAT(offloader->store(0).Size("entry 1").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("entry 1")));
  EXPECT_EQ(offloader->Add(0, "entry 1", 5000).value(), 1);
  EXPECT_EQ(Get(*offloader, 1).value(), std::string(5000, '\0'));
  EXPECT_EQ(offloader->Add(0, "more", 1).value(), 3);
}

TEST(OffloaderStoresTest, WhatCouldNotBeMovedCanBeRemoved) {
  for (const auto operation : {kRead, kWrite}) {
    const auto offloader = Faulty(Failing(operation), 1, 2);
    if (operation == kRead) {
      offloader->Prefetch(0);
    } else {
      ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
    }
    ASSERT_OK(offloader->Remove(0));
    ASSERT_OK(Put(*offloader, 1, Pattern(2, 4096))) << "there is room";
    EXPECT_OK(offloader->Flush(0));
  }
}

TEST(OffloaderStoresTest, WhatIsStillMovedKeepsItsMemoryAfterRemoval) {
  const auto gate = std::make_shared<Gate>();
  const auto offloader = Held(gate, 2, 2, absl::Milliseconds(1));
  gate->Close();
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  EXPECT_THAT(offloader->Remove(0),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("held")));
  EXPECT_EQ(offloader->Add(0, "large", 2 * kPageBytes).value(), 0);
  EXPECT_THAT(
      Get(*offloader, 0).status(),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("large")));
  gate->Open();
  EXPECT_OK(Get(*offloader, 0).status());
}

// The write behind has ended without anybody having waited for it.
TEST(OffloaderStoresTest, AWriteThatHasEndedHindersNoPrefetch) {
  const auto gate = std::make_shared<Gate>();
  const auto offloader = Held(gate, 1, 2);
  gate->Close();
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  offloader->Prefetch(1);
  EXPECT_EQ(offloader->store(0).Stats().reads.operations, 0) << "no room yet";
  gate->Open();
  offloader->Prefetch(1);
  EXPECT_EQ(offloader->store(0).Stats().reads.operations, 1);
  ASSERT_OK(Get(*offloader, 1).status());
  EXPECT_EQ(offloader->stats().prefetched, 1);
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
}

TEST(OffloaderStoresTest, AFailureThatAPrefetchMeetsIsStillReported) {
  const auto gate = std::make_shared<Gate>();
  const auto offloader = Held(gate, 1, 2);
  gate->Close();
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  gate->Open(absl::UnavailableError("it has failed"));
  offloader->Prefetch(1);
  EXPECT_THAT(offloader->Flush(0), StatusIs(absl::StatusCode::kUnavailable,
                                            HasSubstr("it has failed")));
  gate->Open();
  EXPECT_OK(offloader->Flush(0));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
}

TEST(OffloaderStoresTest, WhatIsReadCanBeChangedAfterAll) {
  const auto offloader = WithEntries(Over(Host(), kPageBytes), 2, 4096);
  for (const bool changes : {false, true}) {
    ASSERT_OK_AND_ASSIGN(const absl::Span<char> memory,
                         offloader->Acquire(0, Use::kRead));
    if (changes) offloader->MarkChanged(0);
    memory[7] = 'x';
    offloader->Release(0);
    ASSERT_OK(Get(*offloader, 1).status());  // in its place
    EXPECT_EQ(Get(*offloader, 0).value()[7], changes ? 'x' : '\0');
    ASSERT_OK(Get(*offloader, 1).status());
  }
}

TEST(OffloaderStoresTest, AWriteUnderWayIsOverBeforeItsEntryIsChanged) {
  const auto gate = std::make_shared<Gate>();
  const auto offloader = Held(gate, 1, 1, absl::Milliseconds(1));
  gate->Close();
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK_AND_ASSIGN(const absl::Span<char> memory,
                       offloader->Acquire(0, Use::kRead));
  // The first write does not end in time: a later flush writes the change.
  offloader->MarkChanged(0);
  memory[7] = 'x';
  offloader->Release(0);
  EXPECT_THAT(offloader->Flush(0),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("held")));
  gate->Open();
  ASSERT_OK(offloader->Flush(0));
  std::string expected = Pattern(1, 4096);
  expected[7] = 'x';
  EXPECT_EQ(offloader->store(0).Stats().writes.operations, 2);
  EXPECT_EQ(Get(*offloader, 0).value(), expected);
}

TEST(OffloaderStoresTest, AFlushIsOfOneStore) {
  const auto offloader = Faulty(Failing(kWrite), 4, 1);
  const int other = offloader->AddStore(Host());
  ASSERT_OK_AND_ASSIGN(const int entry, offloader->Add(other, "good", 4096));
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK(Put(*offloader, entry, Pattern(2, 4096)));
  EXPECT_OK(offloader->Flush(other));
  EXPECT_THAT(offloader->Flush(0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("injected")));
}

TEST(OffloaderStoresTest, AFlushWithoutWhatIsBeingChangedIsRefused) {
  const auto offloader =
      Faulty(FaultOf(kWrite, Fault::Effect::kRefuse, 0), 1, 1);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK(offloader->Acquire(0, Use::kUpdate).status());
  EXPECT_THAT(
      offloader->Flush(0),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("entry 0")));
  offloader->Release(0);
  EXPECT_OK(offloader->Flush(0));
}

TEST(OffloaderStoresTest, RollbackUndoesWritesThatFailedAmongThem) {
  const Fault fault = FaultOf(kWrite, Fault::Effect::kFail, 3);
  const auto offloader = WithEntries(
      Over(WithFaults(File(true), {fault}), 8 * kPageBytes), 2, 10007);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 10007)));
  ASSERT_OK(offloader->Flush(0));
  ASSERT_OK(Put(*offloader, 0, Pattern(2, 10007)));
  ASSERT_OK(Put(*offloader, 1, Pattern(3, 10007)));
  ASSERT_OK(Put(*offloader, 0, Pattern(4, 10007)));  // not written
  ASSERT_OK(offloader->Rollback(0));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 10007));
  EXPECT_EQ(Get(*offloader, 1).value(), std::string(10007, '\0'));
  ASSERT_OK(Put(*offloader, 1, Pattern(5, 10007)));
  EXPECT_OK(offloader->Flush(0));
}

TEST(OffloaderStoresTest, ARollbackThatCannotBeChangesNothing) {
  auto offloader = WithEntries(Over(File(false), 8 * kPageBytes), 1, 4096);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  EXPECT_THAT(offloader->Rollback(0), StatusIs(absl::StatusCode::kUnimplemented,
                                               HasSubstr("rollback")));
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));

  offloader = WithEntries(Over(File(true), 8 * kPageBytes), 1, 4096);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK(offloader->Acquire(0, Use::kRead).status());
  EXPECT_THAT(
      offloader->Rollback(0),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("entry 0")));
  offloader->Release(0);
  EXPECT_EQ(Get(*offloader, 0).value(), Pattern(1, 4096));
}

}  // namespace
}  // namespace fsdp::offload::testing
