// What may be chosen, what each costs, and which is taken. Pure: no tensors,
// no ranks.
#ifndef PLANNER_CHOOSE_CANDIDATES_H_
#define PLANNER_CHOOSE_CANDIDATES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/describe/memory_plan.h"

namespace fsdp {

// A combination of options, and what is predicted of it for one rank.
struct Candidate {
  std::string units;     // "8 units"
  std::string strategy;  // "full shard"
  bool prefetch = true;
  bool recompute = false;
  std::string rests;  // "memory", "ssd"

  MemoryPlan plan;
  int64_t activations = 0;  // with the gradients that autograd holds
  double seconds = 0;       // of a step
  std::string refused;      // why it cannot be at all; empty: it can

  int64_t bytes() const { return plan.total() + activations; }
  bool Fits(int64_t memory_bytes) const {
    return refused.empty() && bytes() <= memory_bytes;
  }
};

// As fast as the fastest are all whose predicted step is longer by less than
// this part: it cannot be told apart.
inline constexpr double kSameSpeed = 0.02;

// The index of the candidate that fits and takes the least memory among those
// that are as fast as the fastest that fits; of equals the first.
// ResourceExhausted: none fits, with what the smallest lacks.
absl::StatusOr<int> ChooseCandidate(absl::Span<const Candidate> candidates,
                                    int64_t memory_bytes);

// A line for each, at most `max_lines`: the chosen one, what else fits, the
// fastest first, then what does not, the smallest first; with why it was not
// taken. Those that differ in strategy and prefetching alone, to no effect,
// share the line of the first. `chosen` below 0: none was.
std::string TableOf(absl::Span<const Candidate> candidates, int chosen,
                    int64_t memory_bytes, int max_lines = 24);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_CANDIDATES_H_
