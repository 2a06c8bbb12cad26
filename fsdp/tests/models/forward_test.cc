#include "fsdp/model/forward.h"

#include "fsdp/model/model_view.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 3;

TEST(ForwardTest, RunsUnshardedModulesHoweverTheyAreHeld) {
  torch::nn::Linear holder(kDim, kDim);
  const std::shared_ptr<torch::nn::LinearImpl> pointer = holder.ptr();
  const at::Tensor x = Rows(0, 2, kDim);
  const at::Tensor expected = holder->forward(x);
  EXPECT_TRUE(at::equal(Forward(holder, x), expected));
  EXPECT_TRUE(at::equal(Forward(pointer, x), expected));
  EXPECT_TRUE(at::equal(Forward(*pointer, x), expected));
  EXPECT_FALSE(FindUnit(*pointer).has_value());
}

class ReturnsNothing : public torch::nn::Module {
 public:
  ReturnsNothing()
      : linear(register_module("linear", torch::nn::Linear(kDim, kDim))) {}
  void forward(const at::Tensor& x) { seen = linear->forward(x).detach(); }
  torch::nn::Linear linear;
  at::Tensor seen;
};

TEST(ForwardTest, RunsModulesThatReturnNothing) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto net = std::make_shared<ReturnsNothing>();
    FillParameters(*net, 0);
    const at::Tensor x = Rows(0, 2, kDim);
    net->forward(x);
    const at::Tensor expected = net->seen;
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(communicator)));
    model->forward(x);
    FSDP_RETURN_IF_ERROR(CheckTensor(net->seen, expected, "value"));
    return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                     "bytes of parameters, as no backward can come");
  }));
}

// A module that moves one argument, has a default for another, and counts
// references.
class TakesMany : public torch::nn::Module {
 public:
  TakesMany()
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))) {}
  at::Tensor forward(const at::Tensor& x, double scale,
                     std::unique_ptr<int> shift) {
    return Forward(block, x) * scale + *shift;
  }
  std::shared_ptr<BlockImpl> block;
};

TEST(ForwardTest, ForwardsEveryKindOfArgument) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto net = std::make_shared<TakesMany>();
    FillParameters(*net, 0);
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor expected =
        net->forward(x, 2, std::make_unique<int>(1)).detach();
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(communicator), BlockUnits()));
    return CheckTensor(model->forward(x, 2, std::make_unique<int>(1)), expected,
                       "output");
  }));
}

TEST(UnitHandleTest, TellsWhichModulesAreUnitsAndKeepsTheModelAlive) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& communicator) -> absl::Status {
    auto net = testing::MakeNet(kDim, 2);
    const at::Tensor x = Rows(0, 2, kDim);
    {
      std::optional<UnitHandle> root;
      {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(net, Unowned(communicator), BlockUnits()));
        root = FindUnit(*net);
      }
      const auto block = FindUnit(*net->blocks->ptr(1));
      if (!root.has_value() || !block.has_value()) {
        return absl::InternalError("no handles");
      }
      FSDP_RETURN_IF_ERROR(CheckThat(root->unit(), Eq(0), "unit of the root"));
      FSDP_RETURN_IF_ERROR(CheckThat(block->model()->unit_name(block->unit()),
                                     Eq("blocks.1"), "unit of the block"));
      if (FindUnit(*net->head).has_value() ||
          FindUnit(*net->blocks).has_value()) {
        return absl::InternalError("no units");
      }
      FSDP_RETURN_IF_ERROR(
          root->model()->Backward(Forward(net, x).sum(), false));
    }
    // Without a handle or a wrapper, the model and its parameters are gone.
    if (FindUnit(*net).has_value()) return absl::InternalError("is left");
    const absl::Status status =
        TorchToStatus("forward", [&] { Forward(net, x); });
    return absl::StrContains(status.message(), "keep what FullyShard()")
               ? absl::OkStatus()
               : status;
  }));
}

// Takes by reference what holds no tensor; literals, too.
class TakesReferences : public torch::nn::Module {
 public:
  TakesReferences()
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))) {}
  at::Tensor forward(const at::Tensor& x, const std::string& name, int& calls) {
    ++calls;
    return name == "twice" ? x * 2 : x;
  }
  std::shared_ptr<BlockImpl> block;
};

TEST(ForwardTest, ReferencesAndLiteralsReachAUnitThatTakesItsInputsOver) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto net = std::make_shared<TakesReferences>();
    for (at::Tensor& p : net->parameters()) p.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(communicator)));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    int calls = 0;
    const at::Tensor y = Forward(net, x, "twice", calls);
    FSDP_RETURN_IF_ERROR(CheckThat(calls, Eq(1), "count of calls"));
    return CheckTensor(y, x * 2, "output");
  }));
}

}  // namespace
}  // namespace fsdp::testing
