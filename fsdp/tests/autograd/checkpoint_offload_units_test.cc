// Regions with offloaded arguments around and inside units: losses and
// gradients of all ranks have the same bits as with arguments in memory.
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/autograd/checkpoint_scenario.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::ParamStore;
using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::TemporaryFile;

constexpr int64_t kRows = 3;

// The unit's own memory is an argument.
at::Tensor WithItsWeightAsArgument(Layer& layer, const at::Tensor& x) {
  const at::Tensor y = Region(
      [](const at::Tensor& x, const at::Tensor& weight,
         const at::Tensor& part) {
        return at::linear(x, weight).narrow(1, 0, Layer::kDim) + part;
      },
      x, layer.fc->weight, layer.fc->bias.narrow(0, 1, Layer::kDim));
  return WholeLayer(layer, y);
}

// All regions share one argument.
at::Tensor RegionsWithASharedArgument(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  const at::Tensor shared = at::tanh(y);
  for (const auto& layer : net.layers) {
    y = Region(
        [&](const at::Tensor& y, const at::Tensor& shared) {
          return Forward(layer, y) * shared;
        },
        y, shared);
  }
  return y;
}

struct OffloadScenario {
  Scenario scenario;
  int tensors;  // moved out in one forward and backward
};

std::vector<OffloadScenario> Scenarios() {
  return {
      {{"Around", WholeLayer, EachLayerInARegion}, 3},
      {{"Inside", LayerInThreeRegions, EachLayer}, 9},
      {{"Nested", WholeLayer, NestedRegionsBehindTheFirst}, 3},
      {{"AroundAndInside", LayerInThreeRegions, EachLayerInARegion}, 3 + 9},
      {{"NestedAndInside", LayerInThreeRegions, NestedRegionsBehindTheFirst},
       3 + 9},
      {{"WeightAsArgument", WithItsWeightAsArgument, EachLayer}, 3},
      {{"SharedArgument", WholeLayer, RegionsWithASharedArgument}, 4},
  };
}

std::unique_ptr<ParamStore> Host() {
  return offload::HostStore::Make(64 * offload::kPageBytes).value();
}

std::unique_ptr<ParamStore> File() {
  return TemporaryFile(64 * offload::kPageBytes);
}

at::Tensor Loss(FullyShardedDataParallel<Net>& model, int batch, int rank) {
  return model->forward(Rows(10 * batch + rank, kRows, Layer::kDim))
      .square()
      .mean();
}

// Returns the losses of a step over two batches, of which only the second is
// reduced.
absl::StatusOr<std::vector<at::Tensor>> Step(
    FullyShardedDataParallel<Net>& model, int step, int rank) {
  model->zero_grad();
  std::vector<at::Tensor> losses;
  {
    const NoSyncScope no_sync = model->NoSync();
    losses.push_back(Loss(model, 2 * step, rank));
    FSDP_RETURN_IF_ERROR(model->Backward(losses.back()));
  }
  losses.push_back(Loss(model, 2 * step + 1, rank));
  FSDP_RETURN_IF_ERROR(model->Backward(losses.back()));
  return losses;
}

absl::Status CheckSame(const std::vector<at::Tensor>& losses,
                       const std::vector<at::Tensor>& expected,
                       FullyShardedDataParallel<Net>& model,
                       FullyShardedDataParallel<Net>& reference) {
  for (size_t i = 0; i < losses.size(); ++i) {
    FSDP_RETURN_IF_ERROR(CheckTensor(losses[i], expected[i], "loss"));
  }
  return CheckSameGradients(*model, *reference);
}

absl::Status CheckEmpty(ActivationOffload& offload) {
  return Check(StoreComesTo(offload, 0), "a region is left");
}

using MakeStore = std::unique_ptr<ParamStore> (*)();

class OffloadedUnitsTest
    : public ::testing::TestWithParam<std::tuple<OffloadScenario, MakeStore>> {
};

TEST_P(OffloadedUnitsTest, TrainWithTheBitsOfThoseInMemory) {
  const auto& [offload_scenario, make_store] = GetParam();
  const auto& [scenario, tensors] = offload_scenario;
  for (int world_size : {1, 2, 3}) {
    SCOPED_TRACE(world_size);
    EXPECT_OK(RunAllRanks(
        world_size,
        [&, &scenario = scenario, tensors = tensors,
         &make_store = make_store](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
          FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, world));
          const auto offload = Make(make_store());
          for (int step = 0; step < 2; ++step) {
            offload_of_rank = nullptr;
            FSDP_ASSIGN_OR_RETURN(const auto expected,
                                  Step(reference, step, world.rank()));
            offload_of_rank = offload;
            FSDP_ASSIGN_OR_RETURN(const auto losses,
                                  Step(model, step, world.rank()));
            FSDP_RETURN_IF_ERROR(CheckSame(losses, expected, model, reference));
            FSDP_RETURN_IF_ERROR(CheckEmpty(*offload));
          }
          offload_of_rank = nullptr;
          const ActivationOffloadStats stats = offload->stats();
          // A region may share an argument that is still being written with the
          // region around it.
          const int64_t most = int64_t{4} * tensors;
          return Check(
              stats.failed == 0 && stats.full == 0 &&
                  stats.tensors_out <= most &&
                  stats.tensors_out >= (make_store == &Host ? most : 4),
              absl::StrCat(stats.tensors_out, " tensors moved out, ",
                           stats.failed, " failed"));
        }));
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, OffloadedUnitsTest,
                         ::testing::Combine(::testing::ValuesIn(Scenarios()),
                                            ::testing::Values(&Host, &File)),
                         [](const auto& info) {
                           return absl::StrCat(
                               std::get<0>(info.param).scenario.name,
                               std::get<1>(info.param) == &Host ? "Host"
                                                                : "File");
                         });

TEST(OffloadedMemoryTest, ArgumentsOfAllRegionsAreGoneAfterForward) {
  for (const auto& [scenario, tensors] : Scenarios()) {
    SCOPED_TRACE(scenario.name);
    EXPECT_OK(RunAllRanks(
        2, [&scenario = scenario](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
          offload_of_rank = Make(Host());
          arguments_of_rank.clear();
          const at::Tensor loss = Loss(model, 0, world.rank());
          int alive = 0;
          for (const auto& memory : arguments_of_rank) {
            if (!memory.expired()) ++alive;
          }
          FSDP_RETURN_IF_ERROR(model->Backward(loss));
          offload_of_rank = nullptr;
          // A unit's residual connection saves nothing, and the product with
          // the shared argument is computed in the region.
          return Check(alive == 0,
                       absl::StrCat(alive, " arguments are in memory"));
        }));
  }
}

// The read fails alike on all ranks, so that their collectives stay in step.
TEST(OffloadedFaultTest, AReadThatFailsNamesTheUnitAndTheNextStepIsExact) {
  const Scenario scenario = {"", LayerInThreeRegions, EachLayer};
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, world));
    Fault fault;
    fault.operation = Fault::Operation::kRead;
    fault.nth = 4;  // read ahead for the second unit's second region
    fault.count = 2;
    offload_of_rank = Make(offload::testing::WithFaults(Host(), {fault}));
    const absl::Status status = model->Backward(Loss(model, 0, world.rank()));
    if (!absl::IsUnavailable(status) ||
        !absl::StrContains(status.message(),
                           "move tensor 0 in the arguments of a checkpointed "
                           "region in unit layer1, Float [3, 10] on cpu")) {
      return absl::InternalError(status.ToString());
    }
    FSDP_RETURN_IF_ERROR(CheckEmpty(*offload_of_rank));
    FSDP_ASSIGN_OR_RETURN(const auto losses, Step(model, 1, world.rank()));
    offload_of_rank = nullptr;
    FSDP_ASSIGN_OR_RETURN(const auto expected,
                          Step(reference, 1, world.rank()));
    return CheckSame(losses, expected, model, reference);
  }));
}

}  // namespace
}  // namespace fsdp::testing
