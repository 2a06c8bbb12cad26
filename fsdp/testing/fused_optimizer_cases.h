// Optimizers with and without fused kernels, and shards for them to step.
#ifndef FSDP_TESTING_FUSED_OPTIMIZER_CASES_H_
#define FSDP_TESTING_FUSED_OPTIMIZER_CASES_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp::testing {

// Returns the numels of shards, some of which are empty.
const std::vector<int64_t>& Sizes();

at::Tensor Random(int64_t numel, int seed, at::ScalarType dtype = at::kFloat);

// Leaves that are slices of one tensor, as shards are, with gradients that are
// slices of another.
class Shards {
 public:
  explicit Shards(std::vector<int64_t> sizes,
                  at::ScalarType dtype = at::kFloat);

  // Returns the same values with memory of its own for every leaf.
  Shards Apart() const { return Apart(values.scalar_type()); }
  Shards Apart(at::ScalarType dtype) const;

  // Sets the gradients of step `step` for the leaves that `has` selects.
  void SetGradients(int step, const std::function<bool(size_t)>& has = nullptr,
                    at::ScalarType dtype = at::kFloat);

  at::Tensor All() const;

  at::Tensor values;
  std::vector<at::Tensor> leaves;

 private:
  void Cut();

  std::vector<int64_t> sizes_;
  bool apart_ = false;
};

// An optimizer with and without fused kernels.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> options;
  std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>)>
      make_plain, make_fused;
};

std::vector<Kind> Kinds();

// Makes an optimizer over one group of `leaves` by the `make` of a Kind.
std::unique_ptr<torch::optim::Optimizer> Of(
    const std::function<std::unique_ptr<torch::optim::Optimizer>(
        std::vector<torch::optim::OptimizerParamGroup>)>& make,
    const std::vector<at::Tensor>& leaves);

// Returns which leaves have a gradient: each lacks it in turn, some in the
// first steps.
std::function<bool(size_t)> SomeAt(int step);

std::string Saved(const torch::optim::Optimizer& optimizer);
void Load(const std::string& bytes, torch::optim::Optimizer& optimizer);

// Runs on one thread, because the tensors are too small to be shared by
// several.
class FusedOptimizerTest : public ::testing::TestWithParam<Kind> {
 protected:
  FusedOptimizerTest();
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_FUSED_OPTIMIZER_CASES_H_
