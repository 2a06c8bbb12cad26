#include "fsdp/tests/memory/memory_requests.h"

#include <torch/optim/sgd.h>

#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/state/whole_model.h"

namespace fsdp::testing::memory_requests {

absl::Status Fail(const std::string& text) { return absl::InternalError(text); }

const std::vector<Way>& Ways() {
  static const auto* const ways =
      new std::vector<Way>{{"local", false},
                           {"local bf16", false, false, true},
                           {"host, gathered", true},
                           {"host, common", true, true},
                           {"host, common bf16", true, true, true}};
  return *ways;
}

absl::StatusOr<Group> MakeGroup(const Way& way, int world_size) {
  return way.in_one_host ? CreateSharedMemoryGroup(world_size)
                         : comm::CreateLocalGroup(world_size);
}

Options OptionsFor(const Way& way) {
  Options options = BlockUnits();
  options.share_memory = way.shares;
  options.abort_on_failure = false;
  if (way.is_bf16) options.unit.precision.param_dtype = at::kBFloat16;
  return options;
}

namespace {

// Tells when a rank reaches a fence.
class ToldFence final : public comm::Fence {
 public:
  ToldFence(std::unique_ptr<comm::Fence> base, std::function<void()> tell)
      : base_(std::move(base)), tell_(std::move(tell)) {}
  void Arrive() override {
    base_->Arrive();
    tell_();
  }
  absl::Status Wait(absl::Time deadline) override {
    return base_->Wait(deadline);
  }

 private:
  const std::unique_ptr<comm::Fence> base_;
  const std::function<void()> tell_;
};

class ToldFences final : public comm::ForwardingCommunicator {
 public:
  ToldFences(std::shared_ptr<Communicator> base, std::function<void()> tell)
      : ForwardingCommunicator(std::move(base)), tell_(std::move(tell)) {}

  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    FSDP_ASSIGN_OR_RETURN(comm::CommonMemory common,
                          base().AllocateCommon(bytes));
    common.fence = std::make_unique<ToldFence>(std::move(common.fence), tell_);
    return common;
  }

 private:
  const std::function<void()> tell_;
};

absl::Status Nothing(Net&) { return absl::OkStatus(); }

absl::Status ReshardAll(Net& model) {
  for (int i = 0; i < kBlocks; ++i) {
    FSDP_RETURN_IF_ERROR(Reshard(Block(model, i)));
  }
  return Reshard(*model.module());
}

}  // namespace

std::shared_ptr<Communicator> WithToldFences(std::shared_ptr<Communicator> base,
                                             std::function<void()> tell) {
  return std::make_shared<ToldFences>(std::move(base), std::move(tell));
}

absl::Status UnshardAndWait(torch::nn::Module& module) {
  FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(module));
  return handle.Wait();
}

torch::nn::Module& Block(Net& model, int i) {
  return *model.module()->blocks[i];
}

std::vector<Request> Requests() {
  return {
      {"nothing", Nothing, Nothing, {}},
      {"one unit",
       [](Net& model) { return UnshardAndWait(Block(model, 0)); },
       [](Net& model) { return Reshard(Block(model, 0)); },
       {0}},
      {"one unit, not waited for",
       [](Net& model) { return Unshard(Block(model, 1)).status(); },
       [](Net& model) { return Reshard(Block(model, 1)); },
       {1}},
      {"a look",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 0)));
         return Reshard(Block(model, 0));
       },
       Nothing,
       {}},
      {"the root",
       [](Net& model) { return UnshardAndWait(*model.module()); },
       [](Net& model) { return Reshard(*model.module()); },
       {},
       true},
      {"everything",
       [](Net& model) { return model->RebuildFullParams().status(); },
       ReshardAll,
       {0, 1, 2},
       true},
      {"a forward that nobody goes back through, and the root that it keeps",
       [](Net& model) -> absl::Status {
         const at::AutoGradMode with_grad(true);
         model->forward(Rows(0, 2, kDim));
         return UnshardAndWait(*model.module());
       },
       [](Net& model) { return Reshard(*model.module()); },
       {},
       true},
      {"a forward with grad, a look at its root",
       [](Net& model) -> absl::Status {
         const at::AutoGradMode with_grad(true);
         model->forward(Rows(0, 2, kDim));
         FSDP_RETURN_IF_ERROR(UnshardAndWait(*model.module()));
         return Reshard(*model.module());
       },
       Nothing,
       {}},
      {"a forward that fails",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 2)));
         return TorchToStatus("f", [&] { model->forward(Rows(0, 2, 3)); }).ok()
                    ? Fail("a wrong shape is accepted")
                    : absl::OkStatus();
       },
       Nothing,
       {}},
      {"full parameters",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 0)));
         FSDP_ASSIGN_OR_RETURN(FullParamsScope scope,
                               model->SummonFullParams());
         return scope.Close();
       },
       Nothing,
       {}},
  };
}

Plain::Plain(int ranks, bool is_bf16)
    : ranks_(ranks),
      is_bf16_(is_bf16),
      net_(MakeNet(kDim, kBlocks)),
      before_(MakeNet(kDim, kBlocks)) {}

void Plain::Step(int step) {
  CopyInto(*before_);
  torch::optim::SGD optimizer(net_->parameters(), kRate);
  optimizer.zero_grad();
  for (int rank = 0; rank < ranks_; ++rank) {
    const at::Tensor x = Data(step, rank);
    (Loss(net_->forward(x), x) / ranks_).backward();
  }
  optimizer.step();
  c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : net_->parameters()) {
    parameter.mul_(Growth(step));
  }
}

at::Tensor Plain::Output(const Request& request, const at::Tensor& x) {
  c10::NoGradGuard no_grad;
  const auto mixed = MakeNet(kDim, kBlocks);
  CopyInto(*mixed);
  const auto old = before_->named_parameters();
  for (auto& item : mixed->named_parameters()) {
    bool held = item.key().rfind("blocks.", 0) != 0 && request.holds_root;
    for (int block : request.held) {
      held |= item.key().rfind(absl::StrCat("blocks.", block, "."), 0) == 0;
    }
    if (held) item.value().copy_(old[item.key()]);
  }
  if (!is_bf16_) return mixed->forward(x);
  mixed->to(at::kBFloat16);
  return mixed->forward(x.to(at::kBFloat16));
}

double Plain::Growth(int step) { return step % 2 == 0 ? 1.5 : 0.6; }

at::Tensor Plain::Data(int step, int rank) {
  return Rows(step * 100 + rank * 10, 4, kDim);
}

void Plain::CopyInto(NetImpl& target) {
  c10::NoGradGuard no_grad;
  const auto own = net_->named_parameters();
  for (auto& item : target.named_parameters()) {
    item.value().copy_(own[item.key()]);
  }
}

}  // namespace fsdp::testing::memory_requests
