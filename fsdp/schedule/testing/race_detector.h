// Whether accesses of several ranks to the same memory come in one order
// however the ranks are interleaved: happens-before, by vector clocks.
#ifndef FSDP_SCHEDULE_TESTING_RACE_DETECTOR_H_
#define FSDP_SCHEDULE_TESTING_RACE_DETECTOR_H_

#include <vector>

namespace fsdp::testing {

class RaceDetector {
 public:
  using Clock = std::vector<int>;  // per rank: up to when it is known

  explicit RaceDetector(int num_ranks);

  // Memory that is written and read as a whole; at first it holds 0, which
  // every rank has seen.
  int AddCell();

  struct Access {
    int value = 0;        // for a read: what the cell holds
    int other_rank = -1;  // whose access is in no order with it; -1: none
    bool ordered() const { return other_rank < 0; }
  };
  // In the order of one of the ranks' interleavings.
  Access Read(int rank, int cell);
  Access Write(int rank, int cell, int value);

  // All that `rank` has done so far: what Acquire() lets another one follow.
  Clock Release(int rank);
  void Acquire(int rank, const Clock& clock);
  // Every rank follows what every rank has done.
  void Barrier();

  // What has been read up to now does not matter to anybody.
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
