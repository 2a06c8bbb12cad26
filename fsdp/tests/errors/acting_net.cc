#include "fsdp/tests/errors/acting_net.h"

namespace fsdp::testing::acting_net {

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
  return Check(::testing::Value(status, StatusIs(code, HasSubstr(text))),
               absl::StrCat("not refused: ", status.ToString()));
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

}  // namespace fsdp::testing::acting_net
