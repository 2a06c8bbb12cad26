// A communicator whose operations are recorded, whatever its backend.
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

// Records what is called on the result and on its sub-groups, fences and
// allocations included, and tells `inspector` what fails; allocates nothing for
// it per operation. Stops `inspector` at the end of the result, which
// sub-groups may outlive.
//
// Of collectives on a device only the start is known: nobody asks the device.
std::unique_ptr<Communicator> Inspect(std::unique_ptr<Communicator> base,
                                      std::shared_ptr<Inspector> inspector);

// Memory of small objects that come and go with every operation.

// Gives pieces of up to kBytes from memory of its own, and from the heap where
// more than kPieces are out. Lives until the last piece is back. Thread-safe;
// takes no lock.
class WorkPool {
 public:
  static constexpr size_t kBytes = 96;
  static constexpr int kPieces = 64;

  static std::shared_ptr<WorkPool> Create();

  // Of `pool`.
  static void* Take(const std::shared_ptr<WorkPool>& pool);
  static void Return(void* memory);

  // Pieces that are out and not of the heap.
  int num_taken() const;

 private:
  struct Piece {
    // The first, so that its address is that of the piece.
    alignas(std::max_align_t) std::array<char, kBytes> memory;
    std::shared_ptr<WorkPool> owner;  // while it is out; null: of the heap
    int index = 0;
  };

  WorkPool() = default;

  std::atomic<uint64_t> taken_{0};  // a bit for each piece
  std::array<Piece, kPieces> pieces_;
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_
