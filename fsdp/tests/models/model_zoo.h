// Helpers for tests of models of many kinds.
#ifndef FSDP_TESTS_MODELS_MODEL_ZOO_H_
#define FSDP_TESTS_MODELS_MODEL_ZOO_H_

#include <set>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing::model_zoo {

inline constexpr int64_t kDim = 6;

// Returns a task whose loss is the mean squared error on three rows per part.
inline TrainingTask RowsTask(int64_t dim = kDim) {
  TrainingTask task;
  task.loss = [dim](const TensorFunction& forward, int64_t part) {
    const at::Tensor x = Rows(part * 3, 3, dim);
    return Loss(forward(x), x);
  };
  return task;
}

inline Options UnitsAt(std::set<std::string> paths) {
  Options options;
  options.wrap_policy = [paths = std::move(paths)](const WrapCandidate& c) {
    return paths.count(c.path) > 0;
  };
  return options;
}

}  // namespace fsdp::testing::model_zoo

#endif  // FSDP_TESTS_MODELS_MODEL_ZOO_H_
