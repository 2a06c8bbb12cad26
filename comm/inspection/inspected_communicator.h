// Records the operations of a communicator, whatever its backend.
#ifndef COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_
#define COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "comm/inspection/inspector.h"

namespace fsdp::comm {

// Returns a communicator that records what is called on it and on its
// sub-groups, fences and allocations included, and tells `inspector` what
// fails. Recording an operation allocates nothing. The destructor of the result
// stops `inspector`; sub-groups may live longer.
//
// For collectives on a device only the start is recorded: nobody asks the
// device when they end.
std::unique_ptr<Communicator> Inspect(std::unique_ptr<Communicator> base,
                                      std::shared_ptr<Inspector> inspector);

// Memory for small objects that come and go with every operation. Gives pieces
// of up to kBytes from memory of its own, or from the heap if more than kPieces
// are in use. Lives until the last piece is back. Thread-safe without locks.
class WorkPool {
 public:
  static constexpr size_t kBytes = 96;
  static constexpr int kPieces = 64;

  static std::shared_ptr<WorkPool> Create();

  // Returns a piece of `pool`, or of the heap.
  static void* Take(const std::shared_ptr<WorkPool>& pool);
  static void Return(void* memory);

  // Returns how many pieces are in use, without those of the heap.
  int num_taken() const;

 private:
  struct Piece {
    // The first member, so that its address is that of the piece.
    alignas(std::max_align_t) std::array<char, kBytes> memory;
    std::shared_ptr<WorkPool> owner;  // while in use; null: of the heap
    int index = 0;
  };

  WorkPool() = default;

  std::atomic<uint64_t> taken_{0};  // a bit for each piece
  std::array<Piece, kPieces> pieces_;
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_
