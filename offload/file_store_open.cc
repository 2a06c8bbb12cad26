#include <algorithm>
#include <iterator>
#include <optional>
#include <random>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "offload/commit_log.h"
#include "offload/commit_record.h"
#include "offload/file_engine.h"
#include "offload/file_layout.h"
#include "offload/file_store.h"
#include "offload/io_queue.h"
#include "offload/piece_runner.h"

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
  header.checksums = options.checksums;
  header.owner = options.owner;
  return header;
}

absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(
    const FileStoreOptions& options, int descriptor, std::string& notes) {
  using Queue = FileStoreOptions::Queue;
  SystemCalls& system = *options.system;
  if (options.queue == Queue::kThreads) {
    return system.MakeQueue(QueueKind::kThreads, descriptor,
                            options.queue_depth);
  }
  absl::StatusOr<std::unique_ptr<IoQueue>> queue =
      system.MakeQueue(QueueKind::kIoUring, descriptor, options.queue_depth);
  if (queue.ok() || options.queue == Queue::kIoUring) return queue;
  notes = absl::StrCat(" (", queue.status().message(), ")");
  return system.MakeQueue(QueueKind::kThreads, descriptor, options.queue_depth);
}

std::string Description(const FileLayout& layout, const BackingFile& file,
                        const IoQueue& queue, absl::string_view queue_notes) {
  return absl::StrCat(
      layout.path, ": ", layout.header.capacity, " bytes",
      layout.places == 2 ? " in two places" : "", layout.keep ? ", kept" : "",
      ", blocks of ", layout.header.block_bytes, ", ", queue.Describe(),
      queue_notes, layout.header.checksums ? ", CRC32C" : ", no checksums",
      file.notes().empty() ? "" : ", ", file.notes());
}

absl::StatusOr<FileEngineParts> MakeParts(
    const FileStoreOptions& options, std::unique_ptr<IoQueue> queue,
    std::unique_ptr<const FileLayout> layout) {
  FileEngineParts parts;
  parts.queue = std::move(queue);
  parts.layout = std::move(layout);
  FSDP_ASSIGN_OR_RETURN(
      parts.bounce,
      PageMemory::Allocate(
          *options.allocator,
          PieceRunner::BounceBytes(*parts.layout, parts.queue->depth())));
  if (parts.layout->keep) {
    FSDP_ASSIGN_OR_RETURN(parts.log,
                          CommitLog::Make(*parts.layout, *options.allocator));
  }
  return parts;
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
  FSDP_ASSIGN_OR_RETURN(const PageMemory memory,
                        PageMemory::Allocate(*options.allocator, kHeaderBytes));
  FSDP_ASSIGN_OR_RETURN(FileHeader header,
                        ReadHeader(queue, memory.data(), file.path()));
  if (header.owner == options.owner) return header;
  return absl::FailedPreconditionError(absl::StrCat(
      "reopen ", file.path(), ": it belongs to '", header.owner, "', not to '",
      options.owner, "'; give each rank and each run files of its own"));
}

absl::Status CheckFileBytes(const BackingFile& file, const FileLayout& layout) {
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file.Bytes());
  if (bytes >= layout.FileBytes()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reopen ", layout.path, ": it has ",
                                          bytes, " of ", layout.FileBytes(),
                                          " bytes; somebody has cut it off"));
}

// Returns the commit to go on from, and drops those after it.
absl::StatusOr<CommitRecord> ChooseCommit(FileEngineParts& parts,
                                          std::optional<int64_t> wanted) {
  FSDP_ASSIGN_OR_RETURN(std::vector<CommitRecord> records,
                        parts.log->ReadAll(*parts.queue));
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
  auto layout = absl::make_unique<const FileLayout>(
      file.path(), NewHeader(options), options.keep, options.rollback);
  FSDP_RETURN_IF_ERROR(file.Reserve(layout->FileBytes()));
  if (options.direct) file.BypassCache();
  std::string notes;
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                        MakeQueue(options, file.descriptor(), notes));
  std::string description = Description(*layout, file, *queue, notes);
  FSDP_ASSIGN_OR_RETURN(
      FileEngineParts parts,
      MakeParts(options, std::move(queue), std::move(layout)));
  if (options.keep) FSDP_RETURN_IF_ERROR(WriteFirstCommit(parts, file));
  auto store = absl::WrapUnique(
      new FileStore(std::move(file), std::move(description), std::move(parts)));
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
  if (options.direct) file.BypassCache();
  std::string notes;
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                        MakeQueue(options, file.descriptor(), notes));
  FSDP_ASSIGN_OR_RETURN(FileHeader header, FindHeader(options, *queue, file));
  auto layout = absl::make_unique<const FileLayout>(
      file.path(), std::move(header), /*keep=*/true, /*rollback=*/true);
  FSDP_RETURN_IF_ERROR(CheckFileBytes(file, *layout));
  std::string description = Description(*layout, file, *queue, notes);
  FSDP_ASSIGN_OR_RETURN(
      FileEngineParts parts,
      MakeParts(options, std::move(queue), std::move(layout)));
  FSDP_ASSIGN_OR_RETURN(const CommitRecord record, ChooseCommit(parts, commit));
  auto store = absl::WrapUnique(
      new FileStore(std::move(file), std::move(description), std::move(parts)));
  FSDP_RETURN_IF_ERROR(store->engine_->Begin());
  FSDP_RETURN_IF_ERROR(store->Restore(record));
  return store;
}

int64_t FileStore::DiskBytes(const FileStoreOptions& options) {
  return FileLayout("", NewHeader(options), options.keep, options.rollback)
      .FileBytes();
}

int64_t FileStore::MemoryBytes(const FileStoreOptions& options) {
  const FileLayout layout("", NewHeader(options), options.keep,
                          options.rollback);
  return PieceRunner::BounceBytes(layout, options.queue_depth) +
         (options.keep ? CommitLog::MemoryBytes(layout) : 0);
}

}  // namespace fsdp::offload
