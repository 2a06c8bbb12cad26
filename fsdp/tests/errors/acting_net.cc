#include "fsdp/tests/errors/acting_net.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/check_tensor.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::acting_net {

using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckTensor;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::Eq;
using ::testing::HasSubstr;

Options TransparentOptions() {
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
  options.abort_on_failure = false;
  return options;
}

absl::StatusOr<Model> ShardActing(Communicator& communicator,
                                  const Options& options) {
  return FullyShard(std::make_shared<Acting>(), Unowned(communicator), options);
}

absl::Status CheckStepIsExact(Model& model, Communicator& communicator) {
  FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().parameters.in_use_bytes,
                                 Eq(0), "bytes of parameters"));
  model->module()->act = nullptr;
  FSDP_ASSIGN_OR_RETURN(Model fresh, ShardActing(communicator));
  const at::Tensor x = Rows(communicator.rank(), 3, kDim);
  const at::Tensor loss = model->forward(x).square().mean();
  const at::Tensor expected = fresh->forward(x).square().mean();
  FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  FSDP_RETURN_IF_ERROR(fresh->Backward(expected));
  for (size_t i = 0; i < fresh->Parameters().size(); ++i) {
    if (!at::equal(model->Parameters()[i].grad(),
                   fresh->Parameters()[i].grad())) {
      return absl::InternalError(absl::StrCat("gradient ", i, " differs"));
    }
  }
  return absl::OkStatus();
}

absl::Status Expect(const absl::Status& status, Code code,
                    const std::string& text) {
  if (::testing::Value(status, StatusIs(code, HasSubstr(text)))) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("not refused: ", status.ToString()));
}

void ExpectFails(const Acting::Act& act, Code code, const std::string& text) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    for (int round = 0; round < 2; ++round) {
      model->module()->act = act;
      const absl::Status status = TorchToStatus("step", [&] {
        ThrowIfError(model->Backward(model->forward(Rows(0, 3, kDim)).sum()));
      });
      FSDP_RETURN_IF_ERROR(Expect(status, code, text));
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
}

}  // namespace fsdp::acting_net
