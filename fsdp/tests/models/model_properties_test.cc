// The visible properties of a sharded model, and the effects of edits.

#include "fsdp/precision/mixed_precision.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/training_task.h"
#include "fsdp/tests/models/model_zoo.h"

namespace fsdp::testing {
namespace {

using model_zoo::Filled;
using model_zoo::Nested;
using model_zoo::RowsTask;
using model_zoo::UnitsAt;

TEST(ModelPropertiesTest, NamesAndSizesAreThoseOfTheUnwrappedModel) {
  std::map<std::string, std::vector<int64_t>> expected;
  for (const auto& item : Nested().named_parameters()) {
    expected[item.key()] = item.value().sizes().vec();
  }
  for (const int ranks : {1, 2, 5}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(Filled<Nested>(), Unowned(world),
                                 UnitsAt({"middle", "middle.inner", "third"})));
      std::map<std::string, std::vector<int64_t>> names;
      for (const TensorRange& named : model->Ranges()) {
        names[named.name] = named.sizes;
      }
      std::map<std::string, std::vector<int64_t>> visited;
      FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
          [&](const std::string& name, const at::Tensor& value) {
            visited[name] = value.sizes().vec();
            return absl::OkStatus();
          }));
      FSDP_RETURN_IF_ERROR(
          CheckThat(names, Eq(expected), "sizes of shards by name"));
      return CheckThat(visited, Eq(expected),
                       "sizes of full parameters by name");
    }));
  }
}

// Follows fairscale's test_param_change_after_init.
TEST(ModelPropertiesTest, EditsBeforeTheFirstForwardAreUsed) {
  for (const int ranks : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(ranks, [](Communicator& world) -> absl::Status {
      const auto edited = Filled<Nested>();
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(Filled<Nested>(), Unowned(world),
                                       UnitsAt({"middle", "third"})));
      {
        c10::NoGradGuard no_grad;
        for (at::Tensor& p : edited->parameters()) p.mul_(0.5).add_(0.01);
        for (at::Tensor& p : model->Parameters()) p.mul_(0.5).add_(0.01);
      }
      FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                            RunSharded(RowsTask(), model));
      return CheckSameRecord(
          actual, RunPlain(RowsTask(), edited, world.world_size()), 1e-5);
    }));
  }
}

TEST(ModelPropertiesTest, AScopeOfFullParametersLeavesBuffersInTheirDtype) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = LayerUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.precision.buffer_dtype = at::kBFloat16;
    options.unit.precision.keep_full_precision = [](const torch::nn::Module&) {
      return false;
    };
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeTransformer({1, /*batch_norm=*/true}),
                                     Unowned(world), options));
    FSDP_ASSIGN_OR_RETURN(const FullParamsScope full,
                          model->SummonFullParams());
    for (const auto& item : model.module()->named_buffers()) {
      const bool counts = item.value().scalar_type() == at::kLong;
      if (!counts && item.value().scalar_type() != at::kBFloat16) {
        return absl::InternalError(absl::StrCat("buffer ", item.key()));
      }
    }
    for (const auto& item : model.module()->named_parameters()) {
      if (item.value().scalar_type() != at::kFloat) {
        return absl::InternalError(absl::StrCat("parameter ", item.key()));
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
