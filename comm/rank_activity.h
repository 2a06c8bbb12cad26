// Notes what a rank does between collectives, for those who ask why a job
// hangs.
#ifndef COMM_RANK_ACTIVITY_H_
#define COMM_RANK_ACTIVITY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::comm {

// The phases of a training step, as a rank notes them.
enum class Phase : uint8_t {
  kUnknown,
  kForward,
  kBackward,
  kOutside,     // none of the others: the loss, data, what nobody has noted
  kCheckpoint,  // saving or loading a saved run
  kStep,        // of the optimizer
};
// How many phases there are, for those who read notes as numbers.
inline constexpr int kNumPhases = static_cast<int>(Phase::kStep) + 1;

// Returns a text such as "forward" or "outside forward and backward".
absl::string_view PhaseName(Phase phase);

// The ways in which a rank waits for a store in which something rests. A phase
// goes on meanwhile.
enum class StoreWait : uint8_t {
  kNothing,
  kRead,   // until something has been read
  kRoom,   // until there is memory for something, or it is written
  kWrite,  // until something has been written
};
// How many of these there are.
inline constexpr int kNumStoreWaits = static_cast<int>(StoreWait::kWrite) + 1;

// Returns a text such as "waits for `what` to be read from its store".
std::string StoreWaitText(StoreWait wait, absl::string_view what);

// Takes the notes of one rank. Thread-safe.
class RankActivity {
 public:
  RankActivity() = default;
  RankActivity(const RankActivity&) = delete;
  RankActivity& operator=(const RankActivity&) = delete;
  virtual ~RankActivity() = default;

  // Notes that the rank enters `phase` of `unit`, "" where there is none, and
  // that its memory pools hold `pool_bytes`; -1 leaves that number as it was.
  // Neither waits nor allocates.
  virtual void Note(Phase phase, absl::string_view unit,
                    int64_t pool_bytes) = 0;

  // Notes that the rank waits for the store of `what` ("parameters of unit
  // blocks.3") until EndWait() gets the number that this returns. The phase
  // stays. Where there are several waits only the last is known, or another one
  // if they race. Neither waits nor allocates.
  virtual uint64_t BeginWait(StoreWait wait, absl::string_view what) = 0;
  virtual void EndWait(uint64_t wait) = 0;  // the wait is over

  // For people: the phase, the last operations and the memory of the process.
  virtual std::string Describe() const = 0;
};

// Notes that the rank is in `phase` of `what` while this object lives, and in
// kOutside afterwards. `activity` may be null.
class PhaseScope {
 public:
  PhaseScope(std::shared_ptr<RankActivity> activity, Phase phase,
             absl::string_view what);
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  const std::shared_ptr<RankActivity> activity_;
};

// Notes a wait for as long as this object lives. `activity` may be null.
class StoreWaitScope {
 public:
  StoreWaitScope(RankActivity* activity, StoreWait wait,
                 absl::string_view what);
  ~StoreWaitScope();
  StoreWaitScope(const StoreWaitScope&) = delete;
  StoreWaitScope& operator=(const StoreWaitScope&) = delete;

 private:
  RankActivity* const activity_;
  uint64_t wait_ = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_RANK_ACTIVITY_H_
