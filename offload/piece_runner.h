// Moves pieces of blocks between callers' memory and a file.
#ifndef OFFLOAD_PIECE_RUNNER_H_
#define OFFLOAD_PIECE_RUNNER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "offload/file_layout.h"
#include "offload/page_memory.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

// A piece that is a whole block in memory that starts at a page goes straight
// to the file and back. Any other piece goes through a block of the runner's
// memory, which a write first fills with the rest of the block. Each block that
// is read is compared with the checksum of what was last written there.
//
// While one piece writes to a block, no other piece of that block may be
// started (BlockOrder). Used by one thread.
class PieceRunner {
 public:
  // Returns the bytes of `bounce`: a block for each request in flight.
  static int64_t BounceBytes(const FileLayout& layout, int depth) {
    return depth * layout.header.block_bytes;
  }

  // All arguments must outlive the runner.
  PieceRunner(const FileLayout& layout, IoQueue& queue,
              const PageMemory& bounce);

  bool HasRoom() const {
    return in_flight_ < queue_.depth() && !bounces_.empty();
  }
  int in_flight() const { return in_flight_; }

  // Does what can be done for a piece before there is room for it.
  void Prepare(Piece& piece) const;
  // Starts a piece; needs HasRoom(). Returns its result if it is over at once,
  // and nothing while a request of it is in flight.
  std::optional<absl::Status> Begin(Piece& piece);
  // Takes a piece whose request is over. Returns false if Continue() will start
  // another request and so must come before the next Begin().
  bool Land(Piece& piece);
  // Goes on with a piece that has landed, and returns as Begin() does.
  std::optional<absl::Status> Continue(Piece& piece);

 private:
  std::optional<absl::Status> BeginRead(Piece& piece);
  std::optional<absl::Status> BeginWrite(Piece& piece);
  void StartRead(Piece& piece, char* data, int64_t begin, int64_t end);
  void StartWrite(Piece& piece, char* data, int64_t begin, int64_t end);
  absl::Status FinishRead(Piece& piece);
  absl::Status FinishWrite(Piece& piece);
  // Compares the whole block at `data` with its checksum.
  absl::Status Verify(const Piece& piece, const char* data) const;
  absl::Status Moved(const Piece& piece) const;
  // Returns whether the next write of the block goes to its other place.
  bool ChangesPlace(const Piece& piece) const {
    return layout_.places == 2 && piece.block->committed;
  }
  static bool GoesStraight(const Piece& piece);
  static bool IsWhole(const Piece& piece) {
    return piece.begin == 0 && piece.end == BlockBytes(piece);
  }
  static int64_t BlockBytes(const Piece& piece) {
    return piece.operation->region->BytesOf(piece.index);
  }
  void TakeBounce(Piece& piece);

  const FileLayout& layout_;
  IoQueue& queue_;
  std::vector<char*> bounces_;  // those that no piece has
  int in_flight_ = 0;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_PIECE_RUNNER_H_
