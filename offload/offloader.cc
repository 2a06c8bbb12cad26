#include "offload/offloader.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::offload {

absl::StatusOr<std::unique_ptr<Offloader>> Offloader::Make(
    const OffloaderOptions& options) {
  FSDP_ASSIGN_OR_RETURN(
      PageMemory memory,
      PageMemory::Allocate(*options.allocator, options.memory_bytes));
  return absl::WrapUnique(new Offloader(options, std::move(memory)));
}

Offloader::Offloader(const OffloaderOptions& options, PageMemory memory)
    : options_(options),
      memory_(std::move(memory)),
      extents_(options.memory_bytes) {}

Offloader::~Offloader() = default;

int Offloader::AddStore(std::unique_ptr<ParamStore> store) {
  stores_.push_back(std::move(store));
  return num_stores() - 1;
}

absl::StatusOr<int> Offloader::Add(int store, const std::string& name,
                                   int64_t bytes) {
  FSDP_RETURN_IF_ERROR(stores_[store]->Create(name, bytes));
  return NewEntry(store, name, bytes);
}

absl::StatusOr<int> Offloader::Attach(int store, const std::string& name,
                                      int64_t bytes) {
  FSDP_ASSIGN_OR_RETURN(const int64_t found, stores_[store]->Size(name));
  if (found != bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "attach region '", name, "' of ", stores_[store]->Describe(),
        ": it has ", found, " bytes, not ", bytes,
        "; it was written for another model or another number of ranks"));
  }
  for (const Entry& entry : entries_) {
    if (entry.store != store || entry.name != name) continue;
    return absl::AlreadyExistsError(
        absl::StrCat("attach region '", name, "' of ",
                     stores_[store]->Describe(), ": it has an entry"));
  }
  return NewEntry(store, name, bytes);
}

int Offloader::NewEntry(int store, const std::string& name, int64_t bytes) {
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [](const Entry& e) { return e.store < 0; });
  if (entry == entries_.end()) entry = entries_.emplace(entries_.end());
  entry->store = store;
  entry->name = name;
  entry->bytes = bytes;
  return static_cast<int>(entry - entries_.begin());
}

absl::Status Offloader::Remove(int index) {
  Entry& entry = At(index);
  FSDP_CHECK(!entry.use);
  // Bytes that could not be moved are not needed any more.
  absl::Status settled =
      entry.transfer != nullptr ? Settle(entry) : absl::OkStatus();
  if (entry.transfer != nullptr) {
    orphans_.push_back(
        {std::move(entry.transfer), *entry.place, StoredBytes(entry.bytes)});
    entry = Entry();
    return settled;
  }
  if (entry.place) Drop(entry);
  const Entry removed = std::exchange(entry, Entry());
  return StoreOf(removed).Erase(removed.name);
}

Offloader::Entry& Offloader::At(int index) {
  Entry& entry = entries_[index];
  FSDP_CHECK(entry.store >= 0);  // it was removed
  return entry;
}

absl::Span<char> Offloader::BytesOf(const Entry& entry) const {
  return {memory_.data() + *entry.place, static_cast<size_t>(entry.bytes)};
}

void Offloader::Prefetch(int index) {
  Entry& entry = At(index);
  if (entry.place || !MakeRoom(entry, /*may_wait=*/false).ok()) return;
  if (!StartRead(entry).ok()) Drop(entry);
}

absl::StatusOr<absl::Span<char>> Offloader::Acquire(int index, Use use) {
  Entry& entry = At(index);
  FSDP_CHECK(!entry.use);
  const bool prefetched = entry.transfer != nullptr && !entry.writes;
  ++(prefetched    ? stats_.prefetched
     : entry.place ? stats_.found
                   : stats_.missed);
  // An entry that is being written may be read.
  if (prefetched || (entry.transfer != nullptr && use != Use::kRead)) {
    const absl::Status settled = Settle(entry);
    const bool needed = use != Use::kOverwrite || entry.place.has_value();
    if (needed) FSDP_RETURN_IF_ERROR(settled);
  }
  if (!entry.place) {
    FSDP_RETURN_IF_ERROR(MakeRoom(entry, /*may_wait=*/true));
    if (use != Use::kOverwrite) {
      absl::Status started = StartRead(entry);
      if (!started.ok()) {
        Drop(entry);
        return started;
      }
      FSDP_RETURN_IF_ERROR(Settle(entry));
    }
  }
  entry.use = use;
  entry.last_use = ++uses_;
  return BytesOf(entry);
}

void Offloader::MarkChanged(int index) {
  Entry& entry = At(index);
  FSDP_CHECK(entry.use.has_value());
  if (entry.use != Use::kRead) return;
  entry.use = Use::kUpdate;
  // Release() makes a failed write good.
  if (entry.transfer != nullptr) Settle(entry).IgnoreError();
}

void Offloader::Release(int index) {
  Entry& entry = At(index);
  FSDP_CHECK(entry.use.has_value());
  const bool changed = entry.use != Use::kRead;
  entry.use.reset();
  if (!changed) return;
  // The write was refused, or one is left for which MarkChanged() could not
  // wait. Flush() tries again and reports it.
  if (entry.transfer != nullptr || !StartWrite(entry).ok()) {
    entry.unwritten = true;
  }
}

absl::Status Offloader::Flush(int store) {
  absl::Status first;
  for (Entry& entry : entries_) {
    if (entry.store != store || entry.transfer == nullptr) continue;
    if (entry.writes) first.Update(Settle(entry));
  }
  for (Entry& entry : entries_) {
    if (entry.store != store || !entry.unwritten) continue;
    if (entry.use && entry.use != Use::kRead) {
      first.Update(absl::FailedPreconditionError(absl::StrCat(
          "flush '", entry.name,
          "': it could not be written, and is in use to be changed; release it "
          "first")));
    } else if (entry.transfer == nullptr) {  // else Settle() has said so
      const absl::Status started = StartWrite(entry);
      first.Update(started.ok() ? Settle(entry) : started);
    }
  }
  FSDP_RETURN_IF_ERROR(first);
  FSDP_ASSIGN_OR_RETURN(auto flush, stores_[store]->Flush());
  return flush->Wait(absl::Now() + options_.timeout);
}

absl::Status Offloader::Rollback(int store) {
  for (Entry& entry : entries_) {
    if (entry.store != store) continue;
    if (entry.use) {
      return absl::FailedPreconditionError(absl::StrCat(
          "roll back '", entry.name, "': it is in use; release it first"));
    }
    if (entry.transfer == nullptr) continue;
    // A failed write is undone, and a failed read is repeated.
    const absl::Status settled = Settle(entry);
    if (absl::IsDeadlineExceeded(settled)) return settled;
  }
  FSDP_RETURN_IF_ERROR(stores_[store]->Rollback());
  for (Entry& entry : entries_) {
    if (entry.store != store || !entry.place) continue;
    entry.unwritten = false;
    Drop(entry);
  }
  return absl::OkStatus();
}

absl::Status Offloader::StartRead(Entry& entry) {
  FSDP_ASSIGN_OR_RETURN(entry.transfer,
                        StoreOf(entry).Read(entry.name, 0, BytesOf(entry)));
  entry.writes = false;
  return absl::OkStatus();
}

absl::Status Offloader::StartWrite(Entry& entry) {
  FSDP_ASSIGN_OR_RETURN(entry.transfer,
                        StoreOf(entry).Write(entry.name, 0, BytesOf(entry)));
  entry.writes = true;
  entry.unwritten = false;
  return absl::OkStatus();
}

// Waits for the entry's transfer. One that is still running at the deadline
// goes on, and keeps its memory.
absl::Status Offloader::Settle(Entry& entry) {
  const absl::Time begin = absl::Now();
  absl::Status status = entry.transfer->Wait(begin + options_.timeout);
  stats_.waited_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  if (absl::IsDeadlineExceeded(status)) return status;
  entry.transfer.reset();
  if (status.ok()) return status;
  if (entry.writes) {
    entry.unwritten = true;
  } else {
    Drop(entry);
  }
  return status;
}

absl::Status Offloader::MakeRoom(Entry& entry, bool may_wait) {
  const int64_t bytes = StoredBytes(entry.bytes);
  while (!(entry.place = extents_.Take(bytes))) {
    if (Poll()) continue;
    Entry* const victim = NextToGo();
    if (victim == nullptr) return NoRoomFor(entry);
    if (victim->transfer == nullptr) {
      Drop(*victim);
      continue;
    }
    if (!may_wait) return NoRoomFor(entry);
    const bool writes = victim->writes;
    const absl::Status settled = Settle(*victim);
    // A failed read ahead is no error: nobody has asked for it yet.
    if (writes || absl::IsDeadlineExceeded(settled)) {
      FSDP_RETURN_IF_ERROR(settled);
    }
  }
  entry.last_use = ++uses_;
  stats_.peak_memory_bytes = extents_.peak_used();
  return absl::OkStatus();
}

bool Offloader::Poll() {
  // Failures are left to those who wait.
  for (Entry& entry : entries_) {
    if (entry.transfer == nullptr || !entry.writes) continue;
    if (entry.transfer->Wait(absl::InfinitePast()).ok()) entry.transfer.reset();
  }
  const auto is_over = [this](const Orphan& orphan) {
    if (absl::IsDeadlineExceeded(orphan.transfer->Wait(absl::InfinitePast()))) {
      return false;
    }
    extents_.Give(orphan.place, orphan.bytes);
    return true;
  };
  const auto over = std::remove_if(orphans_.begin(), orphans_.end(), is_over);
  const bool freed = over != orphans_.end();
  orphans_.erase(over, orphans_.end());
  return freed;
}

// Returns the entry to drop: first those that the store has as well, then those
// that are being written, the least recently used first; last those that were
// read ahead, of which the one asked for last is needed last.
Offloader::Entry* Offloader::NextToGo() {
  const auto order = [](const Entry& entry) {
    const bool ahead = entry.transfer != nullptr && !entry.writes;
    return std::make_tuple(ahead, entry.transfer != nullptr,
                           ahead ? -entry.last_use : entry.last_use);
  };
  Entry* next = nullptr;
  for (Entry& entry : entries_) {
    if (!entry.place || entry.use || entry.unwritten) continue;
    if (next == nullptr || order(entry) < order(*next)) next = &entry;
  }
  return next;
}

void Offloader::Drop(Entry& entry) {
  FSDP_CHECK(entry.transfer == nullptr);
  extents_.Give(*entry.place, StoredBytes(entry.bytes));
  entry.place.reset();
}

absl::Status Offloader::NoRoomFor(const Entry& entry) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "no room in memory for '", entry.name, "': it needs ",
      StoredBytes(entry.bytes), " bytes in one piece, and of ",
      options_.memory_bytes, " bytes ", extents_.used(),
      " are in use, the largest free piece has ", extents_.LargestFree(),
      "; allow more memory for offloading, or make units smaller"));
}

}  // namespace fsdp::offload
