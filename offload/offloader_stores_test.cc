// Several stores behind one memory: entries that come and go, flushes and
// rollbacks of one store, and writes behind that end when a test says so.
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/offloader.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Use = Offloader::Use;

constexpr int64_t kCapacity = 4 << 20;

std::unique_ptr<ParamStore> Host() {
  return HostStore::Make(kCapacity).value();
}

std::unique_ptr<ParamStore> File(bool rollback) {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = kCapacity;
  options.block_bytes = 8192;
  options.rollback = rollback;
  return FileStore::Make(options).value();
}

// Compares with strings: entries of three stores are added, used, removed,
// flushed and rolled back, with memory for a part of them.
TEST(OffloaderStoresTest, EntriesOfAllStoresHaveWhatTheyShould) {
  constexpr int kStores = 3;
  struct Model {
    int store = 0;
    std::string now;
    std::string flushed;
  };
  const auto offloader = Over(nullptr, 128 << 10);
  offloader->AddStore(File(true));
  offloader->AddStore(Host());
  offloader->AddStore(File(true));
  std::mt19937 random(11);
  const auto below = [&random](size_t n) {
    return static_cast<int64_t>(random() % n);
  };
  std::map<int, Model> entries;
  for (int turn = 0; turn < 1500; ++turn) {
    const int store = static_cast<int>(below(kStores));
    const int64_t what = below(100);
    if (entries.size() < 4 || what < 8) {
      const int64_t bytes = below(20000);
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
      auto& [entry, model] = *chosen;
      if (what < 21) {
        ASSERT_OK(offloader->Remove(entry));
        entries.erase(chosen);
      } else if (what < 50) {
        model.now = Pattern(turn, static_cast<int64_t>(model.now.size()));
        ASSERT_OK(Put(*offloader, entry, model.now));
      } else if (what < 70) {
        offloader->Prefetch(entry);
      } else {
        ASSERT_OK_AND_ASSIGN(const std::string got, Get(*offloader, entry));
        ASSERT_EQ(got, model.now) << "entry " << entry << ", turn " << turn;
      }
    }
  }
  EXPECT_EQ(offloader->num_stores(), kStores);
  EXPECT_LE(offloader->stats().peak_memory_bytes, 128 << 10);
}

TEST(OffloaderStoresTest, ARegionThatIsThereGetsAnEntry) {
  auto store = Host();
  ASSERT_OK(store->Create("old", 4099));
  ASSERT_OK(WriteNow(*store, "old", 0, Pattern(1, 4099)));
  const auto offloader = Over(std::move(store), 1 << 16);
  EXPECT_THAT(offloader->Attach(0, "other", 1).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'other'")));
  EXPECT_THAT(
      offloader->Attach(0, "old", 4098).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("'old'"), HasSubstr("4099 bytes, not 4098"))));
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
  for (const auto operation :
       {Fault::Operation::kRead, Fault::Operation::kWrite}) {
    Fault fault;
    fault.operation = operation;
    const auto offloader =
        WithEntries(Over(WithFaults(Host(), {fault}), kPageBytes), 2, 4096);
    if (operation == Fault::Operation::kRead) {
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
  const auto offloader = WithEntries(
      Over(WithHeldWrites(Host(), gate), 2 * kPageBytes, absl::Milliseconds(1)),
      2, 4096);
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
  const auto offloader =
      WithEntries(Over(WithHeldWrites(Host(), gate), kPageBytes), 2, 4096);
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
  const auto offloader =
      WithEntries(Over(WithHeldWrites(Host(), gate), kPageBytes), 2, 4096);
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
  const auto offloader = WithEntries(
      Over(WithHeldWrites(Host(), gate), kPageBytes, absl::Milliseconds(1)), 1,
      4096);
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
  Fault fault;
  fault.operation = Fault::Operation::kWrite;
  const auto offloader =
      WithEntries(Over(WithFaults(Host(), {fault}), 4 * kPageBytes), 1, 4096);
  const int other = offloader->AddStore(Host());
  ASSERT_OK_AND_ASSIGN(const int entry, offloader->Add(other, "good", 4096));
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK(Put(*offloader, entry, Pattern(2, 4096)));
  EXPECT_OK(offloader->Flush(other));
  EXPECT_THAT(offloader->Flush(0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("injected")));
}

TEST(OffloaderStoresTest, AFlushWithoutWhatIsBeingChangedIsRefused) {
  Fault fault;
  fault.operation = Fault::Operation::kWrite;
  fault.effect = Fault::Effect::kRefuse;
  const auto offloader =
      WithEntries(Over(WithFaults(Host(), {fault}), kPageBytes), 1, 4096);
  ASSERT_OK(Put(*offloader, 0, Pattern(1, 4096)));
  ASSERT_OK(offloader->Acquire(0, Use::kUpdate).status());
  EXPECT_THAT(
      offloader->Flush(0),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("entry 0")));
  offloader->Release(0);
  EXPECT_OK(offloader->Flush(0));
}

TEST(OffloaderStoresTest, RollbackUndoesWritesThatFailedAmongThem) {
  Fault fault;
  fault.operation = Fault::Operation::kWrite;
  fault.nth = 3;
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
