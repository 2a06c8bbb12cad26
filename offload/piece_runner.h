// Moves pieces of blocks between callers' memory and a file.
#ifndef OFFLOAD_PIECE_RUNNER_H_
#define OFFLOAD_PIECE_RUNNER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "offload/file_layout.h"
#include "offload/io_queue.h"
#include "offload/page_memory.h"

namespace fsdp::offload {

// A piece that is a whole block in memory that starts at a page goes straight
// to the file and back; any other by way of a block of memory of its own, which
// a write first fills with the rest of the block. Each block that is read is
// held against the checksum of what was last written there.
//
// Pieces come one at a time per block when one of them writes (BlockOrder).
// Used by one thread.
class PieceRunner {
 public:
  // As many blocks of memory as can be in flight.
  static int64_t BounceBytes(const FileLayout& layout, int depth) {
    return depth * layout.header.block_bytes;
  }

  // All of it has to outlive the runner.
  PieceRunner(const FileLayout& layout, IoQueue& queue,
              const PageMemory& bounce);

  bool HasRoom() const {
    return in_flight_ < queue_.depth() && !bounces_.empty();
  }
  int in_flight() const { return in_flight_; }

  // What can be done of a piece before there is room for it.
  void Prepare(Piece& piece) const;
  // Starts a piece; HasRoom(). Its result if it is over at once, nothing while
  // a request of it is in flight.
  std::optional<absl::Status> Begin(Piece& piece);
  // The request of a piece is over. False if Continue() starts another one and
  // has to come before the next Begin(); otherwise it can wait.
  bool Land(Piece& piece);
  // Again, its result, or nothing while there is another request in flight.
  std::optional<absl::Status> Continue(Piece& piece);

 private:
  std::optional<absl::Status> BeginRead(Piece& piece);
  std::optional<absl::Status> BeginWrite(Piece& piece);
  void StartRead(Piece& piece, char* data, int64_t begin, int64_t end);
  void StartWrite(Piece& piece, char* data, int64_t begin, int64_t end);
  absl::Status FinishRead(Piece& piece);
  absl::Status FinishWrite(Piece& piece);
  // Of the whole block at `data`.
  absl::Status Verify(const Piece& piece, const char* data) const;
  absl::Status Moved(const Piece& piece) const;

  // Whether the next write of the block goes to its other place.
  bool ChangesPlace(const Piece& piece) const;
  bool GoesStraight(const Piece& piece) const;
  bool IsWhole(const Piece& piece) const;
  int64_t BlockBytes(const Piece& piece) const;
  void TakeBounce(Piece& piece);
  void GiveBounce(Piece& piece);

  const FileLayout& layout_;
  IoQueue& queue_;
  std::vector<char*> bounces_;  // that nobody has
  int in_flight_ = 0;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_PIECE_RUNNER_H_
