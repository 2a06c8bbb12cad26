// Candidates to choose from, what each costs, and which is taken. Pure: no
// tensors, no ranks.
#ifndef PLANNER_CHOOSE_CANDIDATES_H_
#define PLANNER_CHOOSE_CANDIDATES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/describe/memory_plan.h"

namespace fsdp {

// A combination of options, and what is predicted for one rank with it.
struct Candidate {
  std::string units;     // "8 units"
  std::string strategy;  // "full shard"
  bool prefetch = true;
  bool recompute = false;
  std::string rests;  // "memory", "ssd"

  MemoryPlan plan;
  int64_t activations = 0;  // bytes, with the gradients that autograd holds
  double seconds = 0;       // of a step
  std::string refused;      // why it is impossible; empty: it is possible

  int64_t bytes() const { return plan.total() + activations; }
  bool Fits(int64_t memory_bytes) const {
    return refused.empty() && bytes() <= memory_bytes;
  }
};

// Candidates whose predicted step is longer than the fastest by less than this
// part count as equally fast: they cannot be told apart.
inline constexpr double kSameSpeed = 0.02;

// Returns the index of a candidate that fits: of those that are as fast as the
// fastest, the one with the least memory, of equals the first.
// ResourceExhausted says that none fits, and what the smallest lacks.
absl::StatusOr<int> ChooseCandidate(absl::Span<const Candidate> candidates,
                                    int64_t memory_bytes);

// Returns a table of at most `max_lines` lines, with why each was not taken:
// the chosen one; others that fit, the fastest first; those that do not, the
// smallest first; impossible ones. Those that differ in strategy and
// prefetching alone, to no effect, share a line. `chosen` is negative if none
// was.
std::string TableOf(absl::Span<const Candidate> candidates, int chosen,
                    int64_t memory_bytes, int max_lines = 24);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_CANDIDATES_H_
