// A second, naive model of memory. It follows the bytes that ranks read and
// write when they carry out the actions of a Schedule, and what a user does
// between steps. It knows what an action means (schedule.h,
// docs/architecture.md), not why it is asked for, and stops at the first of
// these violations:
//
// - A unit computes, on any rank, without being gathered there.
// - A unit computes with other bytes than those of the last write that was
//   finished before its iteration (before kUnshard, if the user has gathered
//   it), on any rank and in any order of ranks that fences and collectives
//   allow. This holds for backward and recomputation, too.
// - A rank writes its shard while a gather reads it, or its part of a common
//   copy while another rank may be reading it.
// - Memory is given back or gathered into while a gather writes it.
// - Gradients are copied to where an earlier reduction may still be reading.
// - When a backward ends, or a unit steps, a gradient is missing in the shard,
//   is in it twice, or is still to come.
#ifndef FSDP_SCHEDULE_TESTING_MEMORY_MODEL_H_
#define FSDP_SCHEDULE_TESTING_MEMORY_MODEL_H_

#include <deque>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp::testing {

// Finds out by vector clocks (happens-before) whether accesses of several ranks
// to the same memory come in one order, however ranks are interleaved.
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

// Selects how units that share memory are gathered.
enum class Sharing {
  kInPlace,     // shards lie side by side: ranks compute with each other's
  kCommonCopy,  // all ranks have one copy in another dtype; each writes a part
};

class MemoryModel {
 public:
  MemoryModel(std::vector<ScheduledUnit> units, const ScheduleOptions& options,
              Sharing sharing, int num_ranks = 3);

  // All ranks report `event` and carry out `actions`, each at its own pace.
  void Happens(const Event& event, const Actions& actions);

  // --- What users do between events ---------------------------------------
  // Returns whether no step is under way. A forward and its backward are one
  // step, and so are the backwards that accumulate and the one that
  // synchronizes.
  bool MayWrite() const;
  // Makes every rank write all of its shards, as optimizers, edits and loading
  // do.
  void Write();
  // Makes every rank read the whole unit; it may, after kUnshard and
  // kWaitUnshard.
  bool MayLook(int unit) const;
  void Look(int unit);
  // Returns whether shards were written after kUnshard. A forward that expects
  // a backward is refused then.
  bool IsOlderThanShards(int unit) const;
  // Does what zero_grad() does.
  void DropGradients();
  // Do what SetKept() to false does.
  void DropWholeGradients(int unit);
  void DropSums(int unit);

  // Returns the first violation, or "". Nothing is checked after it.
  const std::string& violation() const { return violation_; }

 private:
  using Gradients = std::multiset<int>;  // one number per PostBackward

  struct Unit {
    bool in_place = false;
    bool common = false;
    std::vector<int> shards;  // cells, per rank
    std::vector<int> parts;   // of the common copy, per rank

    enum class Memory { kFree, kInFlight, kGathered } memory = Memory::kFree;
    bool is_copy = false;          // gathered by kGatherCopy
    bool reads_shards = false;     // the gather in flight reads them
    int gathered_version = 0;      // in private memory
    int part_version = -1;         // kept by kShrink; -1: nothing
    bool part_is_current = false;  // written since shards opened
    int copied_version = 0;        // in the common copy
    std::vector<RaceDetector::Clock> gather_starts;  // per rank, or none

    int version = 0;             // counts writes of the shards
    int user_writes = 0;         // those between steps
    int version_at_start = 0;    // of this iteration
    int version_asked_for = -1;  // by kUnshard, to be used; -1: none

    int backwards = 0;                // under way
    int iteration = -1;               // of the last forward; -1: none yet
    int due = 0;                      // version that this iteration reads
    int user_writes_at_forward = -1;  // user_writes at its first forward

    Gradients given;           // by the event under way
    Gradients whole;           // kept whole
    Gradients sums;            // kept sums of the shard group
    Gradients of_shard;        // reduced
    Gradients expected;        // in `whole`, `sums` or `of_shard`
    std::set<int> doomed;      // of steps given up: may be there or not
    bool synchronizes = true;  // set by kSetReduction
    bool all_reduces = true;
  };
  struct Reduction {
    int unit = 0;
    Gradients gradients;
    bool started = false;
    bool replicating = false;
    std::vector<RaceDetector::Clock> starts;  // per rank, or none
  };

  void BeforeActions(const Event& event);
  void AfterActions(const Event& event);
  void BeginForward(const Event& event);
  void BeginIteration();
  void GiveUp();
  static void Doom(Unit& unit, const Gradients& gradients);
  void CheckEndOfBackward(bool synchronizes);

  void Do(const Action& action);
  void Gather(Unit& unit);
  void FillReduceBuffer(int unit);
  void Reduce(int unit);
  void Replicate(int unit);
  void KeepSums(int unit);
  void ReplicateSums(int unit);
  void WaitReduce(int unit);
  void Step(int unit);

  std::vector<RaceDetector::Clock> ReleaseAll(const Unit& unit);
  void AcquireAll(const std::vector<RaceDetector::Clock>& clocks);
  Reduction* Oldest(int unit, bool started, bool replicating);
  void WriteShards(Unit& unit);
  void Compute();
  void Read(int unit, int due);
  void ReadCells(int unit, const std::vector<int>& cells, int due);
  void CheckVersion(int unit, int version, int due);
  bool IsComplete(const Unit& unit) const;
  void Violate(int unit, absl::string_view what);

  const ScheduleOptions options_;
  const std::vector<ScheduledUnit> scheduled_;
  RaceDetector ranks_;
  const int num_ranks_;
  std::vector<Unit> units_;
  std::vector<int> forwards_;  // under way, the innermost last
  bool in_backward_ = false;
  bool accumulates_ = false;  // the last backward kept gradients whole
  int iteration_ = 0;
  std::deque<Reduction> reductions_;  // oldest first
  int num_gradients_ = 0;
  int num_finished_ = 0;  // those of backwards that have ended
  std::string event_;     // under way, for messages
  std::string violation_;
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_MEMORY_MODEL_H_
