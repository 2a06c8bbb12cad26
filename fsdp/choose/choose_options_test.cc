#include "fsdp/choose/choose_options.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/choose/step_costs.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/tie.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::HasSubstr;

constexpr int64_t kDim = 256;
constexpr int kBlocks = 6;
constexpr int64_t kRows = 300;

std::shared_ptr<NetImpl> DeferredNet() {
  const DeferredInit deferred;
  return std::make_shared<NetImpl>(kDim, kBlocks);
}

// As fast as nothing, so that memory alone decides what is as fast.
StepCosts SomeCosts() {
  StepCosts costs;
  costs.memory_bandwidth = 1e10;
  costs.latency = 1e-5;
  costs.gather_bandwidth = costs.reduce_bandwidth = 1e9;
  costs.host_bandwidth = costs.ssd_bandwidth = 1e9;
  return costs;
}

AutoOptions Wanted(const std::shared_ptr<NetImpl>& net, int64_t memory_bytes) {
  AutoOptions wanted;
  wanted.memory_bytes = memory_bytes;
  wanted.rows = kRows;
  wanted.loss = [net = net.get()](int64_t rows) {
    const at::Tensor x = Rows(0, rows, kDim);
    return Loss(net->forward(x).to(at::kFloat), x);
  };
  wanted.base = BlockUnits();
  wanted.costs = SomeCosts();
  return wanted;
}

// What a rank allocates while it trains by `choice`, at most.
absl::StatusOr<int64_t> MeasuredPeak(const std::shared_ptr<NetImpl>& net,
                                     Communicator& ranks,
                                     const AutoChoice& choice) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(net, Unowned(ranks), choice.options));
  FusedAdamW optimizer(model->Parameters());
  const at::Tensor x = Rows(0, kRows, kDim);
  for (int step = 0; step < 3; ++step) {
    if (step == 1) meter->TakePeak();
    FSDP_RETURN_IF_ERROR(
        model->Backward(Loss(model->forward(x).to(at::kFloat), x)));
    optimizer.step();
    optimizer.zero_grad();
  }
  const MemoryPlan plan = model->PlanMemory();
  if (plan.total() != choice.plan.total()) {
    return absl::InternalError(absl::StrCat("planned\n", choice.plan.ToString(),
                                            "is\n", plan.ToString()));
  }
  return meter->peak();
}

TEST(ChooseOptionsTest, Explore) {
  for (int ranks : {1, 2, 3}) {
    for (int64_t mib : {64, 16, 8}) {
      EXPECT_OK(
          RunAllRanks(ranks, [&](Communicator& communicator) -> absl::Status {
            const auto net = DeferredNet();
            const AutoOptions wanted = Wanted(net, mib << 20);
            auto chosen = ChooseOptions(net, Unowned(communicator), wanted);
            if (!chosen.ok()) {
              std::cerr << chosen.status() << "\n";
              return absl::OkStatus();
            }
            FSDP_ASSIGN_OR_RETURN(const int64_t peak,
                                  MeasuredPeak(net, communicator, *chosen));
            if (communicator.rank() == 0) {
              std::cerr << ranks << " ranks\n"
                        << chosen->ToString() << chosen->plan.ToString()
                        << "measured " << peak / 1048576.0 << " planned "
                        << (chosen->plan.total() + chosen->activations) /
                               1048576.0
                        << "\n";
            }
            return absl::OkStatus();
          }));
    }
  }
}

}  // namespace
}  // namespace fsdp
