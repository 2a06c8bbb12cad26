#include "offload/file_engine.h"

#include <cstring>

#include "absl/strings/string_view.h"
#include "base/files/checksums.h"
#include "base/output_file.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

// Returns "write region 'blocks.3, exp_avg', block 2".
std::string What(const Piece& piece) {
  return absl::StrCat(piece.writes ? "write" : "read", " region '",
                      piece.operation->region->name, "', block ", piece.index);
}

int64_t BlockBytes(const Piece& piece) {
  return piece.operation->region->BytesOf(piece.index);
}

bool IsWhole(const Piece& piece) {
  return piece.begin == 0 && piece.end == BlockBytes(piece);
}

bool GoesStraight(const Piece& piece) {
  return IsWhole(piece) && piece.end % kPageBytes == 0 &&
         reinterpret_cast<uintptr_t>(piece.user) % kPageBytes == 0;
}

}  // namespace

void FileEngine::Prepare(Piece& piece) const {
  if (!piece.writes || piece.prepared || !IsWhole(piece)) return;
  piece.next.checksum =
      Crc32c(absl::string_view(piece.user, piece.end - piece.begin));
  piece.prepared = true;
}

void FileEngine::Continue(Piece& piece) {
  absl::Status result;
  if (piece.phase == Piece::Phase::kReading) {
    result = FinishRead(piece);
  } else if (piece.phase == Piece::Phase::kWriting) {
    result = FinishWrite(piece);
  } else {
    result = Merge(piece);
    if (result.ok()) {
      return StartWrite(piece, piece.bounce);
    }
  }
  if (piece.bounce != nullptr) {
    bounces_.push_back(std::exchange(piece.bounce, nullptr));
  }
  PieceIsOver(piece, result);
}

absl::Status FileEngine::Merge(Piece& piece) {
  FSDP_RETURN_IF_ERROR(Moved(piece));
  FSDP_RETURN_IF_ERROR(Verify(piece, piece.bounce));
  std::memcpy(piece.bounce + piece.begin, piece.user, piece.end - piece.begin);
  return absl::OkStatus();
}

std::optional<absl::Status> FileEngine::BeginRead(Piece& piece) {
  const Block& block = *piece.block;
  if (block.damaged) {
    return absl::DataLossError(
        absl::StrCat(What(piece), " of ", layout().path,
                     ": an earlier write of it has failed; write it again"));
  }
  if (block.current.generation == 0) {
    std::memset(piece.user, 0, piece.end - piece.begin);
    return absl::OkStatus();
  }
  piece.phase = Piece::Phase::kReading;
  if (!GoesStraight(piece)) TakeBounce(piece);
  StartRead(piece);
  return std::nullopt;
}

absl::Status FileEngine::FinishRead(Piece& piece) {
  FSDP_RETURN_IF_ERROR(Moved(piece));
  if (piece.bounce == nullptr) return Verify(piece, piece.user);
  FSDP_RETURN_IF_ERROR(Verify(piece, piece.bounce));
  std::memcpy(piece.user, piece.bounce + piece.begin, piece.end - piece.begin);
  return absl::OkStatus();
}

std::optional<absl::Status> FileEngine::BeginWrite(Piece& piece) {
  const Block& block = *piece.block;
  const bool whole = IsWhole(piece);
  if (GoesStraight(piece)) {
    StartWrite(piece, piece.user);
    return std::nullopt;
  }
  if (!whole && block.damaged) {
    return absl::DataLossError(absl::StrCat(
        What(piece), " of ", layout().path,
        ": an earlier write of it has failed; write the whole block again, ",
        BlockBytes(piece), " bytes from offset ",
        piece.index * layout().header.block_bytes, " on"));
  }
  TakeBounce(piece);
  if (!whole && block.current.generation > 0) {
    piece.phase = Piece::Phase::kMerging;
    StartRead(piece);
    return std::nullopt;
  }
  std::memset(piece.bounce, 0, StoredBytes(BlockBytes(piece)));
  std::memcpy(piece.bounce + piece.begin, piece.user, piece.end - piece.begin);
  StartWrite(piece, piece.bounce);
  return std::nullopt;
}

void FileEngine::StartRead(Piece& piece) {
  StartRequest(piece, IoRequest::Kind::kRead, piece.block->place,
               piece.bounce != nullptr ? piece.bounce : piece.user);
}

void FileEngine::StartWrite(Piece& piece, char* data) {
  const Block& block = *piece.block;
  piece.phase = Piece::Phase::kWriting;
  piece.next.generation = block.current.generation + 1;
  if (!piece.prepared) {
    piece.next.checksum = Crc32c(absl::string_view(data, BlockBytes(piece)));
  }
  StartRequest(piece, IoRequest::Kind::kWrite,
               ChangesPlace(piece) ? 1 - block.place : block.place, data);
}

void FileEngine::StartRequest(Piece& piece, IoRequest::Kind kind, int place,
                              char* data) {
  piece.kind = kind;
  piece.data = data;
  piece.bytes = StoredBytes(BlockBytes(piece));
  piece.offset =
      layout().BlockStart(piece.operation->region->offset, piece.index, place);
  ++in_flight_;
  parts_.queue->Start(&piece);
}

absl::Status FileEngine::FinishWrite(Piece& piece) {
  Block& block = *piece.block;
  absl::Status moved = Moved(piece);
  if (!moved.ok()) {
    block.damaged = true;
    return moved;
  }
  if (ChangesPlace(piece)) {
    block.replaced = std::exchange(block.other, block.current);
    block.place = static_cast<uint8_t>(1 - block.place);
    block.committed = false;
  } else {
    block.replaced = block.current;
  }
  block.current = piece.next;
  block.damaged = false;
  return absl::OkStatus();
}

absl::Status FileEngine::Verify(const Piece& piece, const char* data) const {
  const Block& block = *piece.block;
  const uint32_t found = Crc32c(absl::string_view(data, BlockBytes(piece)));
  if (found == block.current.checksum) return absl::OkStatus();
  const std::string where = absl::StrCat(What(piece), ", at ", piece.offset,
                                         " of ", layout().path, ": ");
  const std::string advice =
      layout().keep ? "; reopen the store at its last commit, on a sound device"
                    : "; go back to a checkpoint, on a sound device";
  if (block.replaced.generation > 0 && found == block.replaced.checksum) {
    return absl::DataLossError(absl::StrCat(
        where, "the block is stale: generation ", block.replaced.generation,
        " is there, ", block.current.generation,
        " was written; the device has lost a write", advice));
  }
  return absl::DataLossError(absl::StrCat(
      where, "the block is torn or changed: the checksum of what is there is ",
      absl::Hex(found, absl::kZeroPad8), ", of what was written (generation ",
      block.current.generation, ") ",
      absl::Hex(block.current.checksum, absl::kZeroPad8), advice));
}

absl::Status FileEngine::Moved(const Piece& piece) const {
  if (piece.result == piece.bytes) return absl::OkStatus();
  return CheckMoved(piece, What(piece), layout().path);
}

void FileEngine::TakeBounce(Piece& piece) {
  FSDP_CHECK(!bounces_.empty());
  piece.bounce = bounces_.back();
  bounces_.pop_back();
}

FileEngine::FileEngine(FileEngineParts parts) : parts_(std::move(parts)) {
  FSDP_CHECK(parts_.bounce.bytes() >=
             BounceBytes(layout(), parts_.queue->depth()));
  for (int i = 0; i < parts_.queue->depth(); ++i) {
    bounces_.push_back(parts_.bounce.data() + i * layout().header.block_bytes);
  }
}

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
    if (in_flight_ == 0 && !TakeNew()) return;
    // The pieces that will be started next.
    const int64_t next = std::min<int64_t>(static_cast<int64_t>(ready_.size()),
                                           parts_.queue->depth());
    for (int64_t i = 0; i < next; ++i) Prepare(*ready_[i]);
    parts_.queue->Wait(over);
    Land(over);
  }
}

// The device gets its next requests before anybody looks at what it has read:
// checksums take time in which it would have less to do.
void FileEngine::Land(const std::vector<IoRequest*>& over) {
  for (IoRequest* request : over) {
    Piece& piece = *static_cast<Piece*>(request);
    --in_flight_;
    if (piece.phase == Piece::Phase::kMerging) {
      Continue(piece);  // it starts another request
    } else {
      landed_.push_back(&piece);
    }
  }
  StartPieces();
  for (Piece* piece : landed_) Continue(*piece);
  landed_.clear();
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
    if (order_.Enter(&piece)) ready_.push_back(&piece);
  }
}

void FileEngine::StartPieces() {
  while (!ready_.empty() && HasRoom()) {
    Piece& piece = *ready_.front();
    ready_.pop_front();
    const std::optional<absl::Status> result =
        piece.writes ? BeginWrite(piece) : BeginRead(piece);
    if (result.has_value()) PieceIsOver(piece, *result);
  }
}

void FileEngine::PieceIsOver(Piece& piece, const absl::Status& result) {
  std::vector<Piece*> next;
  order_.Leave(piece, next);
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
  for (const auto& region : flush.regions) {
    for (size_t i = 0; i < region->blocks.size(); ++i) {
      if (!region->blocks[i].damaged) continue;
      return absl::DataLossError(
          absl::StrCat("flush: a write of region '", region->name, "', block ",
                       i, " has failed; write it again before the flush"));
    }
  }
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
  FSDP_RETURN_IF_ERROR(parts_.log->Write(
      queue, {parts_.layout->header.file_id, next, flush.regions}));
  broken_ = parts_.log->Sync(queue, what);
  FSDP_RETURN_IF_ERROR(broken_);
  parts_.other_record = parts_.commit;
  parts_.commit = next;
  return absl::OkStatus();
}

}  // namespace fsdp::offload
