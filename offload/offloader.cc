#include "offload/offloader.h"

#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::offload {

absl::StatusOr<std::unique_ptr<Offloader>> Offloader::Make(
    std::unique_ptr<ParamStore> store, const OffloaderOptions& options) {
  FSDP_ASSIGN_OR_RETURN(
      PageMemory memory,
      PageMemory::Allocate(*options.allocator, options.memory_bytes));
  return absl::WrapUnique(
      new Offloader(std::move(store), options, std::move(memory)));
}

Offloader::Offloader(std::unique_ptr<ParamStore> store,
                     const OffloaderOptions& options, PageMemory memory)
    : store_(std::move(store)),
      options_(options),
      memory_(std::move(memory)),
      extents_(options.memory_bytes) {}

// Transfers wait for their end, before the memory goes.
Offloader::~Offloader() { entries_.clear(); }

absl::StatusOr<int> Offloader::Add(const std::string& name, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(store_->Create(name, bytes));
  Entry& entry = entries_.emplace_back();
  entry.name = name;
  entry.bytes = bytes;
  return static_cast<int>(entries_.size()) - 1;
}

absl::Span<char> Offloader::BytesOf(const Entry& entry) const {
  return {memory_.data() + *entry.place, static_cast<size_t>(entry.bytes)};
}

void Offloader::Prefetch(int index) {
  Entry& entry = entries_[index];
  if (entry.place || !MakeRoom(entry, /*may_wait=*/false).ok()) return;
  if (!StartRead(entry).ok()) Drop(entry);
}

absl::StatusOr<absl::Span<char>> Offloader::Acquire(int index, Use use) {
  Entry& entry = entries_[index];
  FSDP_CHECK(!entry.use);
  const bool prefetched = entry.transfer != nullptr && !entry.writes;
  ++(prefetched    ? stats_.prefetched
     : entry.place ? stats_.found
                   : stats_.missed);
  // What is being written may be read.
  if (prefetched || (entry.transfer != nullptr && use != Use::kRead)) {
    const absl::Status settled = Settle(entry);
    const bool needed = use != Use::kOverwrite || entry.place.has_value();
    if (needed) FSDP_RETURN_IF_ERROR(settled);
  }
  if (!entry.place) {
    FSDP_RETURN_IF_ERROR(MakeRoom(entry, /*may_wait=*/true));
    if (use != Use::kOverwrite) FSDP_RETURN_IF_ERROR(BringIn(entry));
  }
  entry.use = use;
  entry.last_use = ++uses_;
  return BytesOf(entry);
}

absl::Status Offloader::BringIn(Entry& entry) {
  const absl::Status started = StartRead(entry);
  if (started.ok()) return Settle(entry);
  Drop(entry);
  return started;
}

void Offloader::Release(int index) {
  Entry& entry = entries_[index];
  FSDP_CHECK(entry.use.has_value());
  const bool changed = entry.use != Use::kRead;
  entry.use.reset();
  // Refused: Flush() tries again, and reports it.
  if (changed && !StartWrite(entry).ok()) entry.unwritten = true;
}

absl::Status Offloader::Flush() {
  absl::Status first;
  for (Entry& entry : entries_) {
    if (entry.writes && entry.transfer != nullptr) first.Update(Settle(entry));
  }
  for (Entry& entry : entries_) {
    if (!entry.unwritten) continue;
    absl::Status again = StartWrite(entry);
    if (again.ok()) again = Settle(entry);
    first.Update(again);
  }
  FSDP_RETURN_IF_ERROR(first);
  FSDP_ASSIGN_OR_RETURN(auto flush, store_->Flush());
  return flush->Wait(absl::Now() + options_.timeout);
}

absl::Status Offloader::StartRead(Entry& entry) {
  FSDP_ASSIGN_OR_RETURN(entry.transfer,
                        store_->Read(entry.name, 0, BytesOf(entry)));
  entry.writes = false;
  return absl::OkStatus();
}

absl::Status Offloader::StartWrite(Entry& entry) {
  FSDP_ASSIGN_OR_RETURN(entry.transfer,
                        store_->Write(entry.name, 0, BytesOf(entry)));
  entry.writes = true;
  entry.unwritten = false;
  return absl::OkStatus();
}

// A transfer that is still running at the deadline goes on, and keeps its
// memory.
absl::Status Offloader::Settle(Entry& entry) {
  const absl::Time begin = absl::Now();
  const absl::Status status = entry.transfer->Wait(begin + options_.timeout);
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
    Entry* const victim = NextToGo();
    if (victim == nullptr) return NoRoomFor(entry);
    if (victim->transfer == nullptr) {
      Drop(*victim);
      continue;
    }
    if (!may_wait) return NoRoomFor(entry);
    const bool writes = victim->writes;
    const absl::Status settled = Settle(*victim);
    // Nobody has asked yet for what could not be read ahead.
    if (writes || absl::IsDeadlineExceeded(settled)) {
      FSDP_RETURN_IF_ERROR(settled);
    }
  }
  entry.last_use = ++uses_;
  stats_.peak_memory_bytes = extents_.peak_used();
  return absl::OkStatus();
}

// First what the store has as well, then what it is about to have, the least
// recently used first; last what was read ahead, beginning with what was asked
// for last and so is needed last.
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

OffloaderStats Offloader::stats() const { return stats_; }

}  // namespace fsdp::offload
