#include "fsdp/schedule/testing/race_detector.h"

#include <algorithm>
#include <vector>

namespace fsdp::testing {

RaceDetector::RaceDetector(int num_ranks)
    : clocks_(num_ranks, Clock(num_ranks, 0)) {
  for (int rank = 0; rank < num_ranks; ++rank) clocks_[rank][rank] = 1;
}

int RaceDetector::AddCell() {
  cells_.emplace_back();
  cells_.back().read_at.assign(clocks_.size(), 0);
  return static_cast<int>(cells_.size()) - 1;
}

RaceDetector::Access RaceDetector::Read(int rank, int cell) {
  Cell& at = cells_[cell];
  at.read_at[rank] = clocks_[rank][rank];
  const bool follows = at.written_at <= clocks_[rank][at.writer];
  return {at.value, follows ? -1 : at.writer};
}

RaceDetector::Access RaceDetector::Write(int rank, int cell, int value) {
  Cell& at = cells_[cell];
  Access access{value};
  if (at.written_at > clocks_[rank][at.writer]) access.other_rank = at.writer;
  for (size_t other = 0; other < clocks_.size(); ++other) {
    if (at.read_at[other] > clocks_[rank][other]) {
      access.other_rank = static_cast<int>(other);
    }
  }
  at.value = value;
  at.writer = rank;
  at.written_at = clocks_[rank][rank];
  at.read_at.assign(clocks_.size(), 0);
  return access;
}

RaceDetector::Clock RaceDetector::Release(int rank) {
  Clock clock = clocks_[rank];
  ++clocks_[rank][rank];
  return clock;
}

void RaceDetector::Acquire(int rank, const Clock& clock) {
  for (size_t other = 0; other < clock.size(); ++other) {
    clocks_[rank][other] = std::max(clocks_[rank][other], clock[other]);
  }
}

void RaceDetector::Barrier() {
  std::vector<Clock> arrivals;
  arrivals.reserve(clocks_.size());
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    arrivals.push_back(Release(static_cast<int>(rank)));
  }
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    for (const Clock& clock : arrivals) {
      Acquire(static_cast<int>(rank), clock);
    }
  }
}

void RaceDetector::ForgetReads() {
  for (Cell& cell : cells_) cell.read_at.assign(clocks_.size(), 0);
}

}  // namespace fsdp::testing
