// Recomputations leave no changes in buffers. KnownProgramTest has regions
// around units of sharded models.
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>

#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;

// A block with LibTorch's running statistics, and a buffer that every use
// changes.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl()
      : fc(register_module("fc", torch::nn::Linear(kDim, kDim))),
        norm(register_module("norm", torch::nn::BatchNorm1d(kDim))),
        uses(register_buffer("uses", at::zeros({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    {
      const c10::NoGradGuard no_grad;
      uses.mul_(0.5).add_(x.mean(0));
    }
    return norm->forward(fc->forward(x)).tanh();
  }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm;
  at::Tensor uses;
};

at::Tensor StepWith(const CheckpointOptions& options,
                    const std::shared_ptr<BlockImpl>& block) {
  const at::Tensor x = Rows(0, 4, kDim);
  const at::Tensor y = CheckpointWith(
      options, [block](const at::Tensor& x) { return block->forward(x); }, x);
  y.square().sum().backward();
  return block->fc->weight.grad();
}

std::shared_ptr<BlockImpl> MakeBlock() {
  auto block = std::make_shared<BlockImpl>();
  testing::FillParameters(*block, 1);
  return block;
}

TEST(CheckpointBuffersTest, OfModulesThatAreNamed) {
  auto plain = MakeBlock();
  plain->forward(Rows(0, 4, kDim)).square().sum().backward();
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  EXPECT_TRUE(at::allclose(StepWith(options, block), plain->fc->weight.grad()));
  EXPECT_OK(SameBuffers(*block, *plain));
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(CheckpointBuffersTest, StayAsTheyAreWhereThatIsWanted) {
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  options.restore_buffers = false;
  StepWith(options, block);
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 2);
}

// A graph that has saved a buffer before may still run backward.
TEST(CheckpointBuffersTest, ArePutBackWithoutCountingAsModified) {
  auto block = MakeBlock();
  block->eval();
  CheckpointOptions options;
  options.modules = {block};
  at::Tensor x = Rows(0, 4, kDim).requires_grad_();
  const at::Tensor before = x * block->norm->running_var;
  CheckpointWith(
      options, [block](const at::Tensor& x) { return block->norm->forward(x); },
      before)
      .square()
      .sum()
      .backward();
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace fsdp::testing
