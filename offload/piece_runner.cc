#include "offload/piece_runner.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "offload/checksum.h"
#include "offload/param_store.h"

namespace fsdp::offload {
namespace {

// Returns "write region 'blocks.3, exp_avg', block 2".
std::string What(const Piece& piece) {
  return absl::StrCat(piece.writes ? "write" : "read", " region '",
                      piece.operation->region->name, "', block ", piece.index);
}

}  // namespace

PieceRunner::PieceRunner(const FileLayout& layout, IoQueue& queue,
                         const PageMemory& bounce)
    : layout_(layout), queue_(queue) {
  const int64_t block = layout.header.block_bytes;
  FSDP_CHECK(bounce.bytes() >= BounceBytes(layout, queue.depth()));
  for (int i = 0; i < queue.depth(); ++i) {
    bounces_.push_back(bounce.data() + i * block);
  }
}

std::optional<absl::Status> PieceRunner::Begin(Piece& piece) {
  FSDP_CHECK(HasRoom());
  return piece.writes ? BeginWrite(piece) : BeginRead(piece);
}

void PieceRunner::Prepare(Piece& piece) const {
  if (!piece.writes || piece.prepared || !layout_.header.checksums) return;
  if (!IsWhole(piece)) return;
  piece.next.checksum =
      Crc32c(absl::string_view(piece.user, piece.end - piece.begin));
  piece.prepared = true;
}

bool PieceRunner::Land(Piece& piece) {
  --in_flight_;
  return piece.phase != Piece::Phase::kMerging;
}

std::optional<absl::Status> PieceRunner::Continue(Piece& piece) {
  absl::Status result;
  if (piece.phase == Piece::Phase::kReading) {
    result = FinishRead(piece);
  } else if (piece.phase == Piece::Phase::kWriting) {
    result = FinishWrite(piece);
  } else {
    result = Moved(piece);
    if (result.ok()) result = Verify(piece, piece.bounce);
    if (result.ok()) {
      std::memcpy(piece.bounce + piece.begin, piece.user,
                  piece.end - piece.begin);
      StartWrite(piece, piece.bounce, 0, BlockBytes(piece));
      return std::nullopt;
    }
  }
  if (piece.bounce != nullptr) {
    bounces_.push_back(std::exchange(piece.bounce, nullptr));
  }
  return result;
}

std::optional<absl::Status> PieceRunner::BeginRead(Piece& piece) {
  const Block& block = *piece.block;
  if (block.damaged) {
    return absl::DataLossError(
        absl::StrCat(What(piece), " of ", layout_.path,
                     ": an earlier write of it has failed; write it again"));
  }
  if (block.current.generation == 0) {
    std::memset(piece.user, 0, piece.end - piece.begin);
    return absl::OkStatus();
  }
  piece.phase = Piece::Phase::kReading;
  if (GoesStraight(piece) && (IsWhole(piece) || !layout_.header.checksums)) {
    StartRead(piece, piece.user, piece.begin, piece.end);
    return std::nullopt;
  }
  TakeBounce(piece);
  if (layout_.header.checksums) {
    StartRead(piece, piece.bounce, 0, BlockBytes(piece));
  } else {
    const int64_t begin = piece.begin / kPageBytes * kPageBytes;
    StartRead(piece, piece.bounce + begin, begin, piece.end);
  }
  return std::nullopt;
}

absl::Status PieceRunner::FinishRead(Piece& piece) {
  FSDP_RETURN_IF_ERROR(Moved(piece));
  if (piece.bounce == nullptr) return Verify(piece, piece.user);
  FSDP_RETURN_IF_ERROR(Verify(piece, piece.bounce));
  std::memcpy(piece.user, piece.bounce + piece.begin, piece.end - piece.begin);
  return absl::OkStatus();
}

std::optional<absl::Status> PieceRunner::BeginWrite(Piece& piece) {
  const Block& block = *piece.block;
  const bool whole = IsWhole(piece);
  // If nothing is checked and nothing moves, the rest of the block can stay.
  const bool alone = !layout_.header.checksums &&
                     block.current.generation > 0 && !ChangesPlace(piece);
  if (GoesStraight(piece) && (whole || (alone && !block.damaged))) {
    StartWrite(piece, piece.user, piece.begin, piece.end);
    return std::nullopt;
  }
  if (!whole && block.damaged) {
    return absl::DataLossError(absl::StrCat(
        What(piece), " of ", layout_.path,
        ": an earlier write of it has failed; write the whole block again, ",
        BlockBytes(piece), " bytes from offset ",
        piece.index * layout_.header.block_bytes, " on"));
  }
  TakeBounce(piece);
  if (!whole && block.current.generation > 0) {
    piece.phase = Piece::Phase::kMerging;
    StartRead(piece, piece.bounce, 0, BlockBytes(piece));
    return std::nullopt;
  }
  std::memset(piece.bounce, 0, StoredBytes(BlockBytes(piece)));
  std::memcpy(piece.bounce + piece.begin, piece.user, piece.end - piece.begin);
  StartWrite(piece, piece.bounce, 0, BlockBytes(piece));
  return std::nullopt;
}

void PieceRunner::StartRead(Piece& piece, char* data, int64_t begin,
                            int64_t end) {
  piece.kind = IoRequest::Kind::kRead;
  piece.data = data;
  piece.bytes = StoredBytes(end - begin);
  piece.offset = begin + layout_.BlockStart(*piece.operation->region,
                                            piece.index, piece.block->place);
  ++in_flight_;
  queue_.Start(&piece);
}

void PieceRunner::StartWrite(Piece& piece, char* data, int64_t begin,
                             int64_t end) {
  const Block& block = *piece.block;
  piece.phase = Piece::Phase::kWriting;
  piece.next.generation = block.current.generation + 1;
  if (layout_.header.checksums && !piece.prepared) {
    piece.next.checksum = Crc32c(absl::string_view(data, end - begin));
  }
  const int place = ChangesPlace(piece) ? 1 - block.place : block.place;
  piece.kind = IoRequest::Kind::kWrite;
  piece.data = data;
  piece.bytes = StoredBytes(end - begin);
  piece.offset =
      begin + layout_.BlockStart(*piece.operation->region, piece.index, place);
  ++in_flight_;
  queue_.Start(&piece);
}

absl::Status PieceRunner::FinishWrite(Piece& piece) {
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

absl::Status PieceRunner::Verify(const Piece& piece, const char* data) const {
  if (!layout_.header.checksums) return absl::OkStatus();
  const Block& block = *piece.block;
  const uint32_t found = Crc32c(absl::string_view(data, BlockBytes(piece)));
  if (found == block.current.checksum) return absl::OkStatus();
  const std::string where = absl::StrCat(What(piece), ", at ", piece.offset,
                                         " of ", layout_.path, ": ");
  const std::string advice =
      layout_.keep ? "; reopen the store at its last commit, on a sound device"
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

absl::Status PieceRunner::Moved(const Piece& piece) const {
  if (piece.result == piece.bytes) return absl::OkStatus();
  return CheckMoved(piece, What(piece), layout_.path);
}

bool PieceRunner::GoesStraight(const Piece& piece) {
  return reinterpret_cast<uintptr_t>(piece.user) % kPageBytes == 0 &&
         piece.begin % kPageBytes == 0 && piece.end % kPageBytes == 0;
}

void PieceRunner::TakeBounce(Piece& piece) {
  FSDP_CHECK(!bounces_.empty());
  piece.bounce = bounces_.back();
  bounces_.pop_back();
}

}  // namespace fsdp::offload
