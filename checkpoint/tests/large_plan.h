// The parts of a large model that ranks save, without values.
#ifndef CHECKPOINT_TESTS_LARGE_PLAN_H_
#define CHECKPOINT_TESTS_LARGE_PLAN_H_

#include <vector>

#include "checkpoint/run/run_values.h"
#include "flat_param/layout.h"

namespace fsdp::checkpoint::testing {

// Units of ten parameters each, sharded over all ranks, with two states of an
// optimizer.
class LargePlan {
 public:
  LargePlan(int parameters, int ranks);

  // As PartsToWrite() has them.
  std::vector<TensorGroup> PartsOf(int rank) const;

 private:
  std::vector<flat_param::FlatLayout> units_;
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_LARGE_PLAN_H_
