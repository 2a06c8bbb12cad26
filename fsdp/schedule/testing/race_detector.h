// Finds out by vector clocks (happens-before) whether accesses of several ranks
// to the same memory come in one order, however ranks are interleaved.
#ifndef FSDP_SCHEDULE_TESTING_RACE_DETECTOR_H_
#define FSDP_SCHEDULE_TESTING_RACE_DETECTOR_H_

#include <vector>

namespace fsdp::testing {

class RaceDetector {
 public:
  using Clock = std::vector<int>;  // per rank: up to when it is known

  explicit RaceDetector(int num_ranks);

  // Adds memory that is written and read as a whole. At first it holds 0, which
  // every rank has seen.
  int AddCell();

  struct Access {
    int value = 0;        // the cell's value
    int other_rank = -1;  // a rank whose access is not ordered; -1: none
    bool ordered() const { return other_rank < 0; }
  };
  // Call these in the order of one of the ranks' interleavings.
  Access Read(int rank, int cell);
  Access Write(int rank, int cell, int value);

  // Returns what `rank` has done so far; Acquire() orders another rank after
  // it.
  Clock Release(int rank);
  void Acquire(int rank, const Clock& clock);
  // Orders every rank after what every rank has done.
  void Barrier();

  // Forgets all reads, so that no write has to follow them.
  void ForgetReads();

 private:
  struct Cell {
    int value = 0;
    int writer = 0;
    int written_at = 0;        // by the writer's clock
    std::vector<int> read_at;  // per rank, by its own clock; 0: never
  };

  std::vector<Clock> clocks_;  // per rank
  std::vector<Cell> cells_;
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_RACE_DETECTOR_H_
