#include "comm/inspection/work_pool.h"

#include <utility>

namespace fsdp::comm {
namespace {

int LowestBit(uint64_t bits) { return __builtin_ctzll(bits); }

}  // namespace

std::shared_ptr<WorkPool> WorkPool::Create() {
  return std::shared_ptr<WorkPool>(new WorkPool());
}

void* WorkPool::Take(const std::shared_ptr<WorkPool>& pool) {
  uint64_t taken = pool->taken_.load(std::memory_order_relaxed);
  while (~taken != 0) {
    const int index = LowestBit(~taken);
    if (!pool->taken_.compare_exchange_weak(taken, taken | uint64_t{1} << index,
                                            std::memory_order_acquire)) {
      continue;
    }
    Piece& piece = pool->pieces_[index];
    piece.owner = pool;
    piece.index = index;
    return piece.memory.data();
  }
  return (new Piece())->memory.data();
}

void WorkPool::Return(void* memory) {
  auto* piece = static_cast<Piece*>(memory);
  if (piece->owner == nullptr) {
    delete piece;
    return;
  }
  const std::shared_ptr<WorkPool> owner = std::move(piece->owner);
  owner->taken_.fetch_and(~(uint64_t{1} << piece->index),
                          std::memory_order_release);
}

int WorkPool::num_taken() const {
  return __builtin_popcountll(taken_.load(std::memory_order_relaxed));
}

}  // namespace fsdp::comm
