#include "offload/file_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/output_file.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "offload/param_store.h"

namespace fsdp::offload {
namespace {

// Runs a request while nothing else is in flight. A Wake() that comes meanwhile
// is handed on to the next Wait().
absl::Status Run(IoQueue& queue, IoRequest request, absl::string_view what,
                 absl::string_view path) {
  queue.Start(&request);
  std::vector<IoRequest*> over;
  while (over.empty()) queue.Wait(over);
  FSDP_CHECK(over.size() == 1 && over[0] == &request);
  queue.Wake();
  return CheckMoved(request, what, path);
}

}  // namespace

absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path) {
  FSDP_RETURN_IF_ERROR(Run(queue,
                           {IoRequest::Kind::kRead, memory, kHeaderBytes, 0, 0},
                           "read the header", path));
  absl::StatusOr<FileHeader> header =
      FileHeader::Decode(absl::string_view(memory, kHeaderBytes));
  if (header.ok()) return header;
  if (absl::IsFailedPrecondition(header.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "read the header of ", path, ": it ", header.status().message()));
  }
  return absl::DataLossError(absl::StrCat(
      "read the header of ", path, ": it ", header.status().message(),
      "; this is no file of an offload store, or it has been changed"));
}

int64_t CommitLog::MemoryBytes(const FileLayout& layout) {
  return std::max(layout.record_bytes, kHeaderBytes);
}

absl::StatusOr<CommitLog> CommitLog::Make(const FileLayout& layout,
                                          PageAllocator& allocator) {
  FSDP_ASSIGN_OR_RETURN(PageMemory memory,
                        PageMemory::Allocate(allocator, MemoryBytes(layout)));
  return CommitLog(layout, std::move(memory));
}

absl::Status CommitLog::WriteHeader(IoQueue& queue) {
  return WriteAt(queue, "write the header", layout_->header.Encode(), 0);
}

absl::Status CommitLog::Write(IoQueue& queue, const CommitRecord& record) {
  return WriteAt(queue, absl::StrCat("commit ", record.commit), record.Encode(),
                 layout_->RecordStart(record.commit));
}

absl::StatusOr<std::vector<CommitRecord>> CommitLog::ReadAll(IoQueue& queue) {
  std::vector<CommitRecord> records;
  for (const int64_t turn : {0, 1}) {
    FSDP_RETURN_IF_ERROR(
        Run(queue,
            {IoRequest::Kind::kRead, memory_.data(), layout_->record_bytes,
             layout_->RecordStart(turn), 0},
            "read a commit", layout_->path));
    absl::StatusOr<CommitRecord> record = CommitRecord::Decode(
        absl::string_view(memory_.data(), layout_->record_bytes),
        layout_->header);
    // The record was never finished, or has been dropped.
    if (!record.ok()) continue;
    records.push_back(*std::move(record));
  }
  std::sort(records.begin(), records.end(),
            [](const CommitRecord& a, const CommitRecord& b) {
              return a.commit < b.commit;
            });
  return records;
}

absl::Status CommitLog::Drop(IoQueue& queue, int64_t commit) {
  return WriteAt(queue, absl::StrCat("drop commit ", commit), "",
                 layout_->RecordStart(commit));
}

// Writes whole pages, with zeros behind `bytes`; an empty `bytes` writes a page
// of zeros.
absl::Status CommitLog::WriteAt(IoQueue& queue, absl::string_view what,
                                absl::string_view bytes, int64_t offset) {
  const int64_t size =
      std::max(kPageBytes, StoredBytes(static_cast<int64_t>(bytes.size())));
  FSDP_CHECK(size <= memory_.bytes());
  std::memset(memory_.data(), 0, size);
  bytes.copy(memory_.data(), bytes.size());
  return Run(queue, {IoRequest::Kind::kWrite, memory_.data(), size, offset, 0},
             what, layout_->path);
}

absl::Status CommitLog::Sync(IoQueue& queue, absl::string_view what) {
  return Run(queue, {IoRequest::Kind::kSync, nullptr, 0, 0, 0}, what,
             layout_->path);
}

namespace {

CommitRecord RecordOf(const FileOperation& flush, const FileHeader& header,
                      int64_t commit) {
  CommitRecord record;
  record.file_id = header.file_id;
  record.commit = commit;
  for (const auto& region : flush.regions) {
    CommitRecord::Region& written = record.regions.emplace_back();
    written.name = region->name;
    written.bytes = region->bytes;
    written.offset = region->offset;
    for (const Block& block : region->blocks) {
      written.blocks.push_back(
          {block.current.generation, block.current.checksum, block.place});
    }
  }
  return record;
}

absl::Status CheckNothingIsDamaged(const FileOperation& flush) {
  for (const auto& region : flush.regions) {
    for (size_t i = 0; i < region->blocks.size(); ++i) {
      if (!region->blocks[i].damaged) continue;
      return absl::DataLossError(
          absl::StrCat("flush: a write of region '", region->name, "', block ",
                       i, " has failed; write it again before the flush"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

FileEngine::FileEngine(FileEngineParts parts)
    : parts_(std::move(parts)),
      runner_(*parts_.layout, *parts_.queue, parts_.bounce) {}

absl::Status FileEngine::Begin() {
  FSDP_ASSIGN_OR_RETURN(thread_,
                        StartThread("for a file store", [this] { Run(); }));
  return absl::OkStatus();
}

FileEngine::~FileEngine() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  parts_.queue->Wake();
  thread_.join();
}

void FileEngine::Start(std::shared_ptr<FileOperation> operation) {
  {
    absl::MutexLock lock(&mutex_);
    new_.push_back(std::move(operation));
    // The first one has woken the thread.
    if (new_.size() > 1) return;
  }
  parts_.queue->Wake();
}

void FileEngine::Run() {
  const FileSizeErrors errors;
  std::vector<IoRequest*> over;
  while (TakeNew()) {
    do {
      StartPieces();
    } while (RunAlone());
    if (runner_.in_flight() == 0 && !TakeNew()) return;
    // The pieces that will be started next.
    const int64_t next = std::min<int64_t>(static_cast<int64_t>(ready_.size()),
                                           parts_.queue->depth());
    for (int64_t i = 0; i < next; ++i) runner_.Prepare(*ready_[i]);
    parts_.queue->Wait(over);
    Land(over);
  }
}

// The device gets its next requests before anybody looks at what it has read:
// checksums take time in which it would have less to do.
void FileEngine::Land(const std::vector<IoRequest*>& over) {
  for (IoRequest* request : over) {
    Piece& piece = *static_cast<Piece*>(request);
    if (runner_.Land(piece)) {
      landed_.push_back(&piece);
    } else {
      Continue(piece);
    }
  }
  StartPieces();
  for (Piece* piece : landed_) Continue(*piece);
  landed_.clear();
}

void FileEngine::Continue(Piece& piece) {
  const std::optional<absl::Status> result = runner_.Continue(piece);
  if (result.has_value()) PieceIsOver(piece, *result);
}

bool FileEngine::TakeNew() {
  std::vector<std::shared_ptr<FileOperation>> taken;
  bool stopping = false;
  {
    absl::MutexLock lock(&mutex_);
    std::swap(taken, new_);
    stopping = stopping_;
  }
  for (auto& operation : taken) Admit(std::move(operation));
  return !stopping || running_ > 0 || alone_ != nullptr;
}

void FileEngine::Admit(std::shared_ptr<FileOperation> operation) {
  if (alone_ != nullptr) {
    held_.push_back(std::move(operation));
    return;
  }
  using Kind = FileOperation::Kind;
  const bool overwrites =
      operation->kind == Kind::kWrite && parts_.other_record.has_value();
  if (operation->kind == Kind::kFlush || overwrites) {
    alone_ = std::move(operation);
    return;
  }
  Split(operation);
}

void FileEngine::Split(const std::shared_ptr<FileOperation>& operation) {
  FileOperation& op = *operation;
  op.self = operation;
  ++running_;
  const int64_t block_bytes = op.region->block_bytes;
  const int64_t end = op.offset + op.bytes;
  op.pieces.reserve(op.bytes / block_bytes + 2);
  for (int64_t at = op.offset; at < end;) {
    Piece& piece = op.pieces.emplace_back();
    piece.operation = &op;
    piece.index = at / block_bytes;
    piece.block = &op.region->blocks[piece.index];
    const int64_t start = piece.index * block_bytes;
    piece.begin = at - start;
    piece.end = std::min(block_bytes, end - start);
    piece.user = op.data + (at - op.offset);
    piece.writes = op.kind == FileOperation::Kind::kWrite;
    at = start + piece.end;
  }
  op.pieces_left = static_cast<int64_t>(op.pieces.size());
  if (op.pieces.empty()) {
    --running_;
    Finish(op);
    return;
  }
  for (Piece& piece : op.pieces) {
    if (order_.Enter(piece.block, &piece)) ready_.push_back(&piece);
  }
}

void FileEngine::StartPieces() {
  while (!ready_.empty() && runner_.HasRoom()) {
    Piece& piece = *ready_.front();
    ready_.pop_front();
    const std::optional<absl::Status> result = runner_.Begin(piece);
    if (result.has_value()) PieceIsOver(piece, *result);
  }
}

void FileEngine::PieceIsOver(Piece& piece, const absl::Status& result) {
  std::vector<Piece*> next;
  order_.Leave(piece.block, piece, next);
  ready_.insert(ready_.end(), next.begin(), next.end());
  FileOperation& operation = *piece.operation;
  operation.first_error.Update(result);
  if (--operation.pieces_left > 0) return;
  --running_;
  Finish(operation);
}

void FileEngine::Finish(FileOperation& operation) {
  const std::shared_ptr<FileOperation> self = std::move(operation.self);
  operation.Finish(operation.first_error);
}

bool FileEngine::RunAlone() {
  if (alone_ == nullptr || running_ > 0) return false;
  const std::shared_ptr<FileOperation> operation = std::move(alone_);
  if (operation->kind == FileOperation::Kind::kFlush) {
    operation->Finish(Flush(*operation));
  } else if (const absl::Status dropped =
                 parts_.log->Drop(*parts_.queue, *parts_.other_record);
             dropped.ok()) {
    // It was erased before the first write over blocks that it names.
    parts_.other_record.reset();
    Split(operation);
  } else {
    StoredRegion& region = *operation->region;
    const int64_t end = operation->offset + operation->bytes;
    for (int64_t block = operation->offset / region.block_bytes;
         block * region.block_bytes < end; ++block) {
      region.blocks[block].damaged = true;
    }
    operation->Finish(dropped);
  }
  while (alone_ == nullptr && !held_.empty()) {
    std::shared_ptr<FileOperation> next = std::move(held_.front());
    held_.pop_front();
    Admit(std::move(next));
  }
  return true;
}

absl::Status FileEngine::Flush(const FileOperation& flush) {
  FSDP_RETURN_IF_ERROR(CheckNothingIsDamaged(flush));
  if (parts_.layout->keep) FSDP_RETURN_IF_ERROR(WriteCommit(flush));
  for (const auto& region : flush.regions) {
    for (Block& block : region->blocks) block.Commit();
  }
  return absl::OkStatus();
}

absl::Status FileEngine::WriteCommit(const FileOperation& flush) {
  FSDP_RETURN_IF_ERROR(broken_);
  const int64_t next = parts_.commit + 1;
  const std::string what = absl::StrCat("commit ", next);
  IoQueue& queue = *parts_.queue;
  broken_ = parts_.log->Sync(queue, what);
  FSDP_RETURN_IF_ERROR(broken_);
  // From here on the file may have this record, whatever is said of the write.
  parts_.other_record = next;
  FSDP_RETURN_IF_ERROR(
      parts_.log->Write(queue, RecordOf(flush, parts_.layout->header, next)));
  broken_ = parts_.log->Sync(queue, what);
  FSDP_RETURN_IF_ERROR(broken_);
  parts_.other_record = parts_.commit;
  parts_.commit = next;
  return absl::OkStatus();
}

}  // namespace fsdp::offload
