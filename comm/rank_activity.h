// What a rank does between collectives, for whoever asks why a job hangs.
#ifndef COMM_RANK_ACTIVITY_H_
#define COMM_RANK_ACTIVITY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::comm {

enum class Phase : uint8_t {
  kUnknown,
  kForward,
  kBackward,
  kOutside,  // of all others: the loss, data, what nobody has noted
  kCheckpoint,
  kStep,  // of the optimizer
};
inline constexpr int kNumPhases = static_cast<int>(Phase::kStep) + 1;

// "forward".
absl::string_view PhaseName(Phase phase);

// What a rank may wait for in a phase, besides other ranks: a store in which
// something rests.
enum class StoreWait : uint8_t {
  kNothing,
  kRead,   // until something has been read
  kRoom,   // until there is memory for something, or it is written
  kWrite,  // until something has been written
};
inline constexpr int kNumStoreWaits = static_cast<int>(StoreWait::kWrite) + 1;

// "waits for `what` to be read from its store".
std::string StoreWaitText(StoreWait wait, absl::string_view what);

// One rank's. Thread-safe.
class RankActivity {
 public:
  RankActivity() = default;
  RankActivity(const RankActivity&) = delete;
  RankActivity& operator=(const RankActivity&) = delete;
  virtual ~RankActivity() = default;

  // The rank is in `phase` of `unit` from now on ("" where there is none) and
  // holds `pool_bytes` in pools of memory; -1: as before. Neither waits nor
  // allocates.
  virtual void Note(Phase phase, absl::string_view unit,
                    int64_t pool_bytes) = 0;

  // The rank waits for `wait` of `what` ("parameters of unit blocks.3") until
  // EndWait(), for what this has returned; the phase stays. Of several waits
  // at a time one is known, the last but for races. Neither waits nor
  // allocates.
  virtual uint64_t BeginWait(StoreWait wait, absl::string_view what) = 0;
  virtual void EndWait(uint64_t wait) = 0;

  // For people: the phase, the last operations, the memory of the process.
  virtual std::string Describe() const = 0;
};

// Notes `phase` of `what`, and that the rank is outside when it ends.
// `activity` may be null.
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

// A wait for as long as it lives. `activity` may be null.
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
