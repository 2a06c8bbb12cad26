#include "offload/file_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "offload/commit_record.h"
#include "offload/file_engine.h"
#include "offload/file_layout.h"
#include "offload/transfer_meter.h"

namespace fsdp::offload {

FileStore::FileStore(BackingFile file, std::string description,
                     FileEngineParts parts)
    : file_(std::move(file)),
      description_(std::move(description)),
      layout_(*parts.layout),
      extents_(layout_.header.capacity),
      commit_(parts.commit),
      engine_(absl::make_unique<FileEngine>(std::move(parts))) {}

FileStore::~FileStore() { engine_.reset(); }

absl::Status FileStore::Restore(const CommitRecord& record) {
  absl::MutexLock lock(&mutex_);
  for (const CommitRecord::Region& found : record.regions) {
    if (!extents_.TakeAt(found.offset, StoredBytes(found.bytes)) ||
        entries_.contains(found.name)) {
      return absl::DataLossError(absl::StrCat(
          "reopen ", layout_.path, ": two regions lie in the same place"));
    }
    Entry& entry = entries_[found.name];
    entry.in_commit = true;
    entry.region = std::make_shared<StoredRegion>(
        found.name, found.bytes, found.offset, layout_.header.block_bytes);
    for (size_t i = 0; i < found.blocks.size(); ++i) {
      Block& block = entry.region->blocks[i];
      block.current = {found.blocks[i].generation, found.blocks[i].checksum};
      block.place = found.blocks[i].place;
      block.Commit();
    }
  }
  return absl::OkStatus();
}

absl::Status FileStore::Create(absl::string_view region, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(CheckNewRegion(region, bytes));
  absl::MutexLock lock(&mutex_);
  if (entries_.contains(region)) return RegionExists(region);
  if (layout_.keep &&
      static_cast<int64_t>(entries_.size()) >= layout_.header.max_regions) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "create region '", region, "': ", layout_.path, " has ",
        entries_.size(), ", the most that it can have; make it with more"));
  }
  const std::optional<int64_t> offset = extents_.Take(StoredBytes(bytes));
  if (!offset.has_value()) {
    return NoSpaceFor(region, bytes, extents_.capacity() - extents_.used(),
                      extents_.LargestFree());
  }
  entries_[region].region = std::make_shared<StoredRegion>(
      std::string(region), bytes, *offset, layout_.header.block_bytes);
  return absl::OkStatus();
}

absl::Status FileStore::Erase(absl::string_view region) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(region);
  if (found == entries_.end()) return NoSuchRegion("erase", region);
  const Entry& entry = found->second;
  if (entry.transfers > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("erase region '", region, "': ", entry.transfers,
                     " transfers of it are under way; wait for them first"));
  }
  const Space space = {entry.region->offset, StoredBytes(entry.region->bytes)};
  if (entry.in_commit) {
    erased_.push_back(space);
  } else {
    extents_.Give(space.offset, space.bytes);
  }
  entries_.erase(found);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> FileStore::Size(absl::string_view region) const {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(region);
  if (found == entries_.end()) {
    return NoSuchRegion("ask for the size of", region);
  }
  return found->second.region->bytes;
}

absl::StatusOr<std::unique_ptr<Transfer>> FileStore::Read(
    absl::string_view region, int64_t offset, absl::Span<char> out) {
  return Start(FileOperation::Kind::kRead, region, offset, out.data(),
               static_cast<int64_t>(out.size()));
}

absl::StatusOr<std::unique_ptr<Transfer>> FileStore::Write(
    absl::string_view region, int64_t offset, absl::Span<const char> in) {
  // Nobody writes to the memory of a write.
  return Start(FileOperation::Kind::kWrite, region, offset,
               const_cast<char*>(in.data()), static_cast<int64_t>(in.size()));
}

absl::StatusOr<std::unique_ptr<Transfer>> FileStore::Start(
    FileOperation::Kind kind, absl::string_view region, int64_t offset,
    char* data, int64_t bytes) {
  const bool reads = kind == FileOperation::Kind::kRead;
  auto operation = std::make_shared<FileOperation>();
  operation->kind = kind;
  operation->offset = offset;
  operation->data = data;
  operation->bytes = bytes;
  operation->when_over = [this, op = operation.get()](const absl::Status& s) {
    TransferIsOver(*op, s);
  };
  {
    absl::MutexLock lock(&mutex_);
    const absl::string_view what = reads ? "read" : "write";
    const auto found = entries_.find(region);
    if (found == entries_.end()) return NoSuchRegion(what, region);
    Entry& entry = found->second;
    FSDP_RETURN_IF_ERROR(
        CheckRange(what, region, entry.region->bytes, offset, bytes));
    operation->region = entry.region;
    ++entry.transfers;
    (reads ? reads_ : writes_).Start(absl::Now());
  }
  engine_->Start(operation);
  return absl::make_unique<FileTransfer>(std::move(operation));
}

void FileStore::TransferIsOver(const FileOperation& operation,
                               const absl::Status& result) {
  absl::MutexLock lock(&mutex_);
  --entries_.find(operation.region->name)->second.transfers;
  const bool reads = operation.kind == FileOperation::Kind::kRead;
  (reads ? reads_ : writes_).Finish(absl::Now(), result.ok(), operation.bytes);
}

absl::StatusOr<std::unique_ptr<Transfer>> FileStore::Flush() {
  auto operation = std::make_shared<FileOperation>();
  operation->kind = FileOperation::Kind::kFlush;
  {
    absl::MutexLock lock(&mutex_);
    ++flushes_;
    for (auto& [name, entry] : entries_) {
      operation->regions.push_back(entry.region);
      entry.in_commit = layout_.keep;
    }
    operation->when_over = [this, erased = std::exchange(erased_, {})](
                               const absl::Status& result) {
      FlushIsOver(erased, result);
    };
  }
  engine_->Start(operation);
  return absl::make_unique<FileTransfer>(std::move(operation));
}

void FileStore::FlushIsOver(const std::vector<Space>& erased,
                            const absl::Status& result) {
  absl::MutexLock lock(&mutex_);
  --flushes_;
  if (!result.ok()) {
    erased_.insert(erased_.end(), erased.begin(), erased.end());
    return;
  }
  for (const Space& space : erased) extents_.Give(space.offset, space.bytes);
  if (layout_.keep) ++commit_;
}

// The engine's thread uses nothing of what is over.
absl::Status FileStore::Rollback() {
  if (layout_.places < 2) {
    return CannotRollBack(Describe());
  }
  absl::MutexLock lock(&mutex_);
  int64_t under_way = flushes_;
  for (const auto& [name, entry] : entries_) under_way += entry.transfers;
  if (under_way > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("roll back ", layout_.path, ": ", under_way,
                     " transfers are under way; wait for them first"));
  }
  for (auto& [name, entry] : entries_) {
    for (Block& block : entry.region->blocks) block.RollBack();
  }
  return absl::OkStatus();
}

StoreStats FileStore::Stats() const {
  absl::MutexLock lock(&mutex_);
  return StatsOf(reads_, writes_, extents_);
}

std::string FileStore::Describe() const { return description_; }

int64_t FileStore::commit() const {
  absl::MutexLock lock(&mutex_);
  return commit_;
}

uint64_t FileStore::run() const { return layout_.header.run; }

std::vector<std::string> FileStore::Regions() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace fsdp::offload
