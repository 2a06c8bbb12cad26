// Checkpointed regions around transparent units: gradients equal those of the
// same model without regions, however often backward runs.

#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

enum class Regions { kNone, kOne, kNested, kTwoOfOneUnit };

class RegionNet : public torch::nn::Module {
 public:
  explicit RegionNet(Regions regions)
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))),
        frozen(register_module("frozen", Linear(kDim, kDim))),
        regions_(regions) {
    testing::FillParameters(*this, 1);
    for (at::Tensor& p : frozen->parameters()) p.set_requires_grad(false);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto inner = [this](const at::Tensor& y) {
      return frozen->forward(b->forward(y)).tanh();
    };
    const auto outer = [this, inner](const at::Tensor& y) {
      const at::Tensor z = a->forward(y).tanh();
      return regions_ == Regions::kNested ? Checkpoint(inner, z) : inner(z);
    };
    if (regions_ == Regions::kNone) return b->forward(outer(x));
    const at::Tensor y = Checkpoint(outer, x);
    if (regions_ != Regions::kTwoOfOneUnit) return b->forward(y);
    return Checkpoint([this](const at::Tensor& z) { return b->forward(z); }, y);
  }

  Linear a, b, frozen;

 private:
  const Regions regions_;
};

enum class Backwards { kOne, kRetained, kTwoAfterTwo, kTwoReversed, kOneOfTwo };

template <typename Forward, typename Backward>
absl::Status Run(Backwards backwards, int rank, const Forward& forward,
                 const Backward& backward) {
  const auto loss = [&](int row) {
    return forward(Rows(rank * 100 + row, 3, kDim)).square().sum();
  };
  const at::Tensor first = loss(0);
  switch (backwards) {
    case Backwards::kOne:
      return backward(first, false);
    case Backwards::kRetained:
      FSDP_RETURN_IF_ERROR(backward(first, true));
      return backward(first, false);
    case Backwards::kTwoAfterTwo: {
      const at::Tensor second = loss(7);
      FSDP_RETURN_IF_ERROR(backward(first, false));
      return backward(second, false);
    }
    case Backwards::kTwoReversed: {
      const at::Tensor second = loss(7);
      FSDP_RETURN_IF_ERROR(backward(second, false));
      return backward(first, false);
    }
    case Backwards::kOneOfTwo:
      return backward(first + loss(7), false);
  }
  return absl::OkStatus();
}

Gradients PlainMeans(Backwards backwards, int world_size) {
  Gradients means;
  for (int rank = 0; rank < world_size; ++rank) {
    RegionNet net(Regions::kNone);
    EXPECT_OK(Run(
        backwards, rank, [&](const at::Tensor& x) { return net.forward(x); },
        [](const at::Tensor& loss, bool retain_graph) {
          loss.backward({}, retain_graph);
          return absl::OkStatus();
        }));
    AddShare(net, world_size, means);
  }
  return means;
}

absl::Status Check(Communicator& world, Regions regions, Backwards backwards) {
  Options options = UnitsOf<LinearImpl>();
  options.transparent = true;
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(std::make_shared<RegionNet>(regions),
                                   Unowned(world), options));
  FSDP_RETURN_IF_ERROR(Run(
      backwards, world.rank(),
      [&](const at::Tensor& x) { return model->forward(x); },
      [&](const at::Tensor& loss, bool retain_graph) {
        return model->Backward(loss, retain_graph);
      }));
  FSDP_RETURN_IF_ERROR(
      CheckMeans(world, *model, PlainMeans(backwards, world.world_size())));
  return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                   "bytes of parameters after training");
}

TEST(TransparentCheckpointTest, AnyNumberOfForwardsAndBackwards) {
  for (const Regions regions :
       {Regions::kOne, Regions::kNested, Regions::kTwoOfOneUnit}) {
    for (const Backwards backwards :
         {Backwards::kOne, Backwards::kRetained, Backwards::kTwoAfterTwo,
          Backwards::kTwoReversed, Backwards::kOneOfTwo}) {
      for (const int world_size : {1, 2}) {
        EXPECT_OK(RunAllRanks(world_size,
                              [&](Communicator& world) {
                                return Check(world, regions, backwards);
                              }))
            << "regions " << static_cast<int>(regions) << ", backwards "
            << static_cast<int>(backwards) << ", ranks " << world_size;
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
