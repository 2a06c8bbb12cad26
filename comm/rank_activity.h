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
  kOutside,  // of both: the loss, the optimizer, data, all else
  kCheckpoint,
};
inline constexpr int kNumPhases = static_cast<int>(Phase::kCheckpoint) + 1;

// "forward".
absl::string_view PhaseName(Phase phase);

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

}  // namespace fsdp::comm

#endif  // COMM_RANK_ACTIVITY_H_
