// Helpers for tests of models of many kinds.
#ifndef FSDP_TESTS_MODELS_MODEL_ZOO_H_
#define FSDP_TESTS_MODELS_MODEL_ZOO_H_

#include <set>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing::model_zoo {

inline constexpr int64_t kDim = 6;

inline absl::StatusOr<Mesh> Line(Communicator& communicator) {
  return Mesh::Create(Unowned(communicator), {{"shard", -1}});
}

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

// Runs `task` with a sharded model of `make` on each of `ranks` ranks.
template <typename Net>
void ExpectTrainsAsOneProcess(int ranks, const TrainingTask& task,
                              const std::function<std::shared_ptr<Net>()>& make,
                              const Options& options) {
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Mesh mesh, Line(world));
    return CheckTask<Net>(task, make, mesh, options);
  }));
}

class MiddleImpl : public torch::nn::Module {
 public:
  MiddleImpl()
      : inner(register_module("inner", torch::nn::Linear(4, 16))),
        outer(register_module("outer", torch::nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    return outer->forward(Forward(inner, x).tanh());
  }
  torch::nn::Linear inner;
  torch::nn::Linear outer;
};

class Nested : public torch::nn::Module {
 public:
  Nested()
      : first(register_module("first", torch::nn::Linear(kDim, 4))),
        middle(register_module("middle", std::make_shared<MiddleImpl>())),
        third(register_module("third", torch::nn::Linear(16, 4))),
        last(register_module("last", torch::nn::Linear(4, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(Forward(third, Forward(middle, first->forward(x))));
  }
  torch::nn::Linear first;
  std::shared_ptr<MiddleImpl> middle;
  torch::nn::Linear third;
  torch::nn::Linear last;
};

}  // namespace fsdp::testing::model_zoo

#endif  // FSDP_TESTS_MODELS_MODEL_ZOO_H_
