#include "offload/file_store.h"

#include <algorithm>
#include <iterator>
#include <random>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "offload/commit_record.h"
#include "offload/page_memory.h"

namespace fsdp::offload {
namespace {

constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;
constexpr int kMaxQueueDepth = 1024;

std::string PathOf(const FileStoreOptions& options) {
  return absl::StrCat(options.directory, "/", options.name);
}

absl::Status CheckOptions(const FileStoreOptions& options) {
  std::string wrong;
  if (options.capacity < 0) {
    wrong = absl::StrCat("a capacity of ", options.capacity, " bytes");
  } else if (options.block_bytes <= 0 || options.block_bytes > kMaxBlockBytes ||
             options.block_bytes % kPageBytes != 0) {
    wrong = absl::StrCat("blocks of ", options.block_bytes,
                         " bytes; take a multiple of ", kPageBytes, ", up to ",
                         kMaxBlockBytes);
  } else if (options.queue_depth < 1 || options.queue_depth > kMaxQueueDepth) {
    wrong = absl::StrCat("a queue depth of ", options.queue_depth,
                         "; take 1 to ", kMaxQueueDepth);
  } else if (options.keep &&
             (options.name.empty() || absl::StrContains(options.name, '/'))) {
    wrong =
        absl::StrCat("the name '", options.name, "'; take one without slashes");
  } else if (static_cast<int64_t>(options.owner.size()) > kMaxOwnerBytes) {
    wrong = absl::StrCat("an owner of ", options.owner.size(),
                         " bytes; take up to ", kMaxOwnerBytes);
  } else if (options.keep && options.max_regions < 1) {
    wrong = absl::StrCat(options.max_regions, " regions at most");
  }
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "make a file store in ", options.directory, ": there is no ", wrong));
}

FileHeader NewHeader(const FileStoreOptions& options) {
  std::random_device random;
  FileHeader header;
  header.file_id = (uint64_t{random()} << 32) | random();
  header.run = options.run;
  header.capacity = StoredBytes(options.capacity);
  header.block_bytes = options.block_bytes;
  header.max_regions = options.keep ? options.max_regions : 0;
  header.owner = options.owner;
  return header;
}

absl::Status MakeQueue(const FileStoreOptions& options, int descriptor,
                       FileEngineParts& parts) {
  SystemCalls& system = *options.system;
  absl::StatusOr<std::unique_ptr<IoQueue>> queue =
      system.MakeQueue(options.queue.value_or(QueueKind::kIoUring), descriptor,
                       options.queue_depth);
  if (!queue.ok() && !options.queue.has_value()) {
    parts.queue_notes = absl::StrCat(" (", queue.status().message(), ")");
    queue =
        system.MakeQueue(QueueKind::kThreads, descriptor, options.queue_depth);
  }
  FSDP_ASSIGN_OR_RETURN(parts.queue, std::move(queue));
  return absl::OkStatus();
}

std::string Description(const FileEngineParts& parts, const BackingFile& file) {
  const FileLayout& layout = *parts.layout;
  return absl::StrCat(layout.path, ": ", layout.header.capacity, " bytes",
                      layout.places == 2 ? " in two places" : "",
                      layout.keep ? ", kept" : "", ", blocks of ",
                      layout.header.block_bytes, ", ", parts.queue->Describe(),
                      parts.queue_notes, ", CRC32C",
                      file.notes().empty() ? "" : ", ", file.notes());
}

absl::Status AllocateMemory(FileEngineParts& parts) {
  FSDP_ASSIGN_OR_RETURN(
      parts.bounce,
      PageMemory::Allocate(
          PageAllocator::System(),
          FileEngine::BounceBytes(*parts.layout, parts.queue->depth())));
  if (!parts.layout->keep) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(parts.log, CommitLog::Make(*parts.layout));
  return absl::OkStatus();
}

// Writes the header and an empty commit 0, and then gives the file its name.
absl::Status WriteFirstCommit(FileEngineParts& parts, BackingFile& file) {
  CommitRecord nothing;
  nothing.file_id = parts.layout->header.file_id;
  FSDP_RETURN_IF_ERROR(parts.log->WriteHeader(*parts.queue));
  FSDP_RETURN_IF_ERROR(parts.log->Write(*parts.queue, nothing));
  FSDP_RETURN_IF_ERROR(parts.log->Sync(*parts.queue, "make the store"));
  return file.Publish();
}

absl::StatusOr<FileHeader> FindHeader(const FileStoreOptions& options,
                                      IoQueue& queue, const BackingFile& file) {
  FSDP_ASSIGN_OR_RETURN(
      const PageMemory memory,
      PageMemory::Allocate(PageAllocator::System(), kHeaderBytes));
  FSDP_ASSIGN_OR_RETURN(FileHeader header,
                        ReadHeader(queue, memory.data(), file.path()));
  if (header.owner == options.owner) return header;
  return absl::FailedPreconditionError(absl::StrCat(
      "reopen ", file.path(), ": it belongs to '", header.owner, "', not to '",
      options.owner, "'; give each rank and each run files of its own"));
}

// Returns the commit to go on from, and drops those after it.
absl::StatusOr<CommitRecord> ChooseCommit(FileEngineParts& parts,
                                          std::optional<int64_t> wanted) {
  FSDP_ASSIGN_OR_RETURN(auto records, parts.log->ReadAll(*parts.queue));
  const std::string& path = parts.layout->path;
  if (records.empty()) {
    return absl::DataLossError(
        absl::StrCat("reopen ", path,
                     ": none of its commits is whole; go back to a "
                     "checkpoint"));
  }
  const std::string known = absl::StrJoin(
      records, " and ", [](std::string* out, const CommitRecord& record) {
        absl::StrAppend(out, record.commit);
      });
  const auto chosen =
      std::find_if(records.begin(), records.end(), [&](const auto& record) {
        return record.commit == wanted.value_or(records.back().commit);
      });
  if (chosen == records.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "reopen ", path, " at commit ", *wanted, ": it has ", known));
  }
  for (auto later = std::next(chosen); later != records.end(); ++later) {
    FSDP_RETURN_IF_ERROR(parts.log->Drop(*parts.queue, later->commit));
    FSDP_RETURN_IF_ERROR(parts.log->Sync(*parts.queue, "reopen"));
  }
  parts.commit = chosen->commit;
  if (chosen != records.begin()) parts.other_record = records.front().commit;
  return std::move(*chosen);
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::Make(
    const FileStoreOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  const FileSizeErrors errors;
  FSDP_ASSIGN_OR_RETURN(
      BackingFile file,
      options.keep
          ? BackingFile::New(*options.system, PathOf(options), options.patience)
          : BackingFile::Scratch(*options.system, options.directory));
  FileEngineParts parts;
  parts.layout = absl::make_unique<const FileLayout>(
      file.path(), NewHeader(options), options.keep, options.rollback);
  FSDP_RETURN_IF_ERROR(file.Reserve(parts.layout->FileBytes()));
  file.BypassCache();
  FSDP_RETURN_IF_ERROR(MakeQueue(options, file.descriptor(), parts));
  FSDP_RETURN_IF_ERROR(AllocateMemory(parts));
  if (options.keep) FSDP_RETURN_IF_ERROR(WriteFirstCommit(parts, file));
  auto store =
      absl::WrapUnique(new FileStore(std::move(file), std::move(parts)));
  FSDP_RETURN_IF_ERROR(store->engine_->Begin());
  return store;
}

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::Reopen(
    const FileStoreOptions& options, std::optional<int64_t> commit) {
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  const FileSizeErrors errors;
  FSDP_ASSIGN_OR_RETURN(BackingFile file,
                        BackingFile::Existing(*options.system, PathOf(options),
                                              options.patience));
  file.BypassCache();
  FileEngineParts parts;
  FSDP_RETURN_IF_ERROR(MakeQueue(options, file.descriptor(), parts));
  FSDP_ASSIGN_OR_RETURN(FileHeader header,
                        FindHeader(options, *parts.queue, file));
  parts.layout = absl::make_unique<const FileLayout>(
      file.path(), std::move(header), /*keep=*/true, /*rollback=*/true);
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file.Bytes());
  if (bytes < parts.layout->FileBytes()) {
    return absl::DataLossError(absl::StrCat(
        "reopen ", file.path(), ": it has ", bytes, " of ",
        parts.layout->FileBytes(), " bytes; somebody has cut it off"));
  }
  FSDP_RETURN_IF_ERROR(AllocateMemory(parts));
  FSDP_ASSIGN_OR_RETURN(const CommitRecord record, ChooseCommit(parts, commit));
  auto store =
      absl::WrapUnique(new FileStore(std::move(file), std::move(parts)));
  FSDP_RETURN_IF_ERROR(store->engine_->Begin());
  FSDP_RETURN_IF_ERROR(store->Restore(record));
  return store;
}

FileStore::FileStore(BackingFile file, FileEngineParts parts)
    : file_(std::move(file)),
      description_(Description(parts, file_)),
      layout_(*parts.layout),
      extents_(layout_.header.capacity),
      commit_(parts.commit),
      engine_(absl::make_unique<FileEngine>(std::move(parts))) {}

absl::Status FileStore::Restore(const CommitRecord& record) {
  absl::MutexLock lock(&mutex_);
  for (const std::shared_ptr<StoredRegion>& region : record.regions) {
    const bool is_free =
        extents_.TakeAt(region->offset, StoredBytes(region->bytes)) &&
        entries_.emplace(region->name, Entry{region, 0, /*in_commit=*/true})
            .second;
    if (is_free) continue;
    return absl::DataLossError(absl::StrCat(
        "reopen ", layout_.path, ": two regions lie in the same place"));
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
  FSDP_ASSIGN_OR_RETURN(const int64_t offset, extents_.TakeFor(region, bytes));
  entries_[region].region = std::make_shared<StoredRegion>(
      std::string(region), bytes, offset, layout_.header.block_bytes);
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
  if (layout_.places < 2) return CannotRollBack(Describe());
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

}  // namespace fsdp::offload
