// What rests in the host's memory, the optimizer alone, and collectives.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "benchmarks/chain.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {
namespace {

constexpr int kWarmUp = 2;

using Model = FullyShardedDataParallel<PairsImpl>;

Model MakeModel(const OffloadCase& what, const Place& place,
                const OffloadOptions& offload) {
  auto net = MakeOn(place, what.dtype, [&what] {
    return std::make_shared<PairsImpl>(what.units, what.dim);
  });
  Options options;
  options.wrap_policy = WrapModules<PairImpl>();
  options.offload = offload;
  return ValueOrThrow(
      FullyShard(std::move(net), LoopbackGroup(place), options));
}

// Is a model with its optimizer, after kWarmUp steps.
class Training {
 public:
  Training(const OffloadCase& what, const Place& place,
           const OffloadOptions& offload)
      : device_(place.device),
        memory_(place.device),
        before_(memory_.allocated()),
        model_(MakeModel(what, place, offload)),
        optimizer_(model_->Parameters(), torch::optim::AdamWOptions(1e-4)),
        x_(at::full({what.rows, what.dim}, 0.5,
                    at::TensorOptions().dtype(what.dtype))
               .to(place.device)) {
    for (int i = 0; i < kWarmUp; ++i) {
      memory_.ResetPeak();
      Run();
    }
    peak_bytes_ = memory_.peak() - before_;
    whole_.clear();
    optimizer_seconds_.clear();
  }

  void Run() {
    const double backward = Time(device_, [this] {
                              const at::Tensor loss =
                                  model_->forward(x_).square().mean();
                              ThrowIfError(model_->Backward(loss));
                              losses_.push_back(loss.detach());
                            }).whole;
    const double optimizer = Time(device_, [this] {
                               optimizer_.step();
                               optimizer_.zero_grad();
                             }).whole;
    whole_.push_back(backward + optimizer);
    optimizer_seconds_.push_back(optimizer);
  }

  int64_t parameter_bytes() const {
    int64_t bytes = 0;
    for (const TensorRange& named : model_->Ranges()) {
      bytes += named.values.numel() *
               static_cast<int64_t>(named.values.element_size());
    }
    return bytes;
  }
  const std::vector<double>& whole() const { return whole_; }
  const std::vector<double>& optimizer() const { return optimizer_seconds_; }
  const std::vector<at::Tensor>& losses() const { return losses_; }
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  const c10::Device device_;
  const DeviceMemory memory_;
  const int64_t before_;
  Model model_;
  FusedAdamW optimizer_;
  const at::Tensor x_;
  int64_t peak_bytes_ = 0;
  std::vector<double> whole_;
  std::vector<double> optimizer_seconds_;
  std::vector<at::Tensor> losses_;  // of the warm-up, too
};

OffloadOptions AllInHostMemory(StepOn step_on) {
  OffloadOptions offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kCpu;
  offload.step_on = step_on;
  return offload;
}

class OffloadRun final : public TurnRun {
 public:
  OffloadRun(const OffloadCase& what, const Place& place)
      : what_(what),
        place_(place),
        away_(what, place, AllInHostMemory(what.step_on)),
        resident_(what, place, OffloadOptions()) {}

  double Turn() override {
    away_.Run();
    resident_.Run();
    return away_.whole().back();
  }

  Figures GetFigures() const override {
    Figures figures = {
        {"ms", 1e3 * Median(away_.whole())},
        {"resident_ms", 1e3 * Median(resident_.whole())},
        {"optimizer_ms", 1e3 * Median(away_.optimizer())},
        {"of_resident", MedianRatio(resident_.whole(), away_.whole())},
        {"optimizer_of_resident",
         MedianRatio(resident_.optimizer(), away_.optimizer())},
        {"loss_difference",
         LossDifference("offloaded", away_.losses(), "resident",
                        resident_.losses(), what_.dtype)},
    };
    if (what_.step_on != StepOn::kFaster) {
      figures["GB/s"] = MovedBytes() / Median(away_.whole()) / 1e9;
    }
    if (DeviceMemory(place_.device).known()) {
      figures["peak_MB"] = static_cast<double>(away_.peak_bytes()) / 1e6;
      figures["resident_peak_MB"] =
          static_cast<double>(resident_.peak_bytes()) / 1e6;
    }
    return figures;
  }

 private:
  // Parameters come for forward and for backward, and gradients go. A device
  // that steps gets parameters, gradients and both states, and gives all but
  // the gradients back.
  double MovedBytes() const {
    const int times = what_.step_on == StepOn::kDevice ? 3 + 7 : 3;
    return static_cast<double>(times * away_.parameter_bytes());
  }

  const OffloadCase what_;
  const Place place_;
  Training away_;
  Training resident_;
};

using Gpt = FullyShardedDataParallel<gpt::GptImpl>;

// A step reads parameter, gradient, two states; writes all but the gradient.
constexpr double kStepMoves = 7;
constexpr double kCopyMoves = 2;

// The model has the gradients of one backward, laid out as in a training.
Gpt MakeModel(const gpt::GptConfig& config, at::ScalarType dtype,
              const Place& place) {
  Options options;
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  auto net = MakeOn(place, dtype, [&config] {
    return std::make_shared<gpt::GptImpl>(config, /*checkpointing=*/false);
  });
  Gpt model =
      ValueOrThrow(FullyShard(std::move(net), LoopbackGroup(place), options));
  const CountingRows rows(config, /*batch=*/1, place.device);
  ThrowIfError(model->Backward(LossOf(model->forward(rows.tokens), rows)));
  return model;
}

int64_t NumElements(const Gpt& model) {
  int64_t numel = 0;
  for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
  return numel;
}

class OptimizerRun final : public TurnRun {
 public:
  OptimizerRun(const gpt::GptConfig& config, at::ScalarType dtype,
               const Place& place)
      : device_(place.device),
        model_(MakeModel(config, dtype, place)),
        optimizer_(model_->Parameters(), torch::optim::AdamWOptions(1e-5)),
        from_(at::ones({NumElements(model_)},
                       at::TensorOptions(place.device).dtype(dtype))),
        to_(at::empty_like(from_)) {
    optimizer_.step();
    to_.copy_(from_);
  }

  double Turn() override {
    const double step = Time(device_, [this] { optimizer_.step(); }).whole;
    const double copy = Time(device_, [this] { to_.copy_(from_); }).whole;
    seconds_.push_back(step);
    of_copy_.push_back((kStepMoves / step) / (kCopyMoves / copy));
    return step;
  }

  Figures GetFigures() const override {
    return {{"ms", 1e3 * Median(seconds_)}, {"of_copy", Median(of_copy_)}};
  }

 private:
  const c10::Device device_;
  Gpt model_;
  FusedAdamW optimizer_;
  const at::Tensor from_;
  const at::Tensor to_;
  std::vector<double> seconds_;
  std::vector<double> of_copy_;
};

// Calls in a row, so that the device never waits for the host.
constexpr int kCalls = 10;

class CollectiveRun final : public TurnRun {
 public:
  CollectiveRun(comm::Collective collective, int64_t bytes, c10::Device device,
                std::shared_ptr<comm::Communicator> group)
      : collective_(collective),
        bytes_(bytes),
        device_(device),
        group_(std::move(group)) {
    const int64_t numel = bytes / static_cast<int64_t>(sizeof(float));
    FSDP_CHECK(numel % group_->world_size() == 0);
    whole_ = OnDevice(numel);
    part_ = OnDevice(numel / group_->world_size());
    copy_ = at::empty_like(whole_);
    Collectives();
    Copies();
    Synchronize(device_);
  }

  double Turn() override {
    const double collectives = Time(device_, [this] { Collectives(); }).whole;
    const double copies = Time(device_, [this] { Copies(); }).whole;
    seconds_.push_back(collectives / kCalls);
    of_copy_.push_back(copies / collectives);
    return seconds_.back();
  }

  Figures GetFigures() const override {
    return {{"GB/s", static_cast<double>(bytes_) / Median(seconds_) / 1e9},
            {"of_copy", Median(of_copy_)}};
  }

 private:
  // Returns memory that the group reaches best.
  at::Tensor OnDevice(int64_t numel) const {
    at::Tensor memory = ValueOrThrow(
        group_->AllocateSymmetric(numel * static_cast<int64_t>(sizeof(float))));
    return memory.view(at::kFloat).fill_(1);
  }

  void Collectives() const {
    for (int i = 0; i < kCalls; ++i) {
      const std::unique_ptr<comm::Work> work = ValueOrThrow(
          collective_ == comm::Collective::kAllGather
              ? group_->AllGather(whole_, part_, "benchmark")
              : group_->ReduceScatter(part_, whole_, comm::ReduceOp::kSum,
                                      "benchmark"));
      ThrowIfError(work->BlockCurrentStream());
    }
  }

  void Copies() const {
    for (int i = 0; i < kCalls; ++i) copy_.copy_(whole_);
  }

  const comm::Collective collective_;
  const int64_t bytes_;
  const c10::Device device_;
  const std::shared_ptr<comm::Communicator> group_;
  at::Tensor whole_;
  at::Tensor part_;
  at::Tensor copy_;
  std::vector<double> seconds_;
  std::vector<double> of_copy_;
};

}  // namespace

std::unique_ptr<TurnRun> MakeOffloadRun(const OffloadCase& what,
                                        const Place& place) {
  FSDP_CHECK(!place.device.is_cpu());
  return std::make_unique<OffloadRun>(what, place);
}

std::unique_ptr<TurnRun> MakeOptimizerRun(const gpt::GptConfig& model,
                                          at::ScalarType dtype,
                                          const Place& place) {
  return std::make_unique<OptimizerRun>(model, dtype, place);
}

std::unique_ptr<TurnRun> MakeCollectiveRun(
    comm::Collective collective, int64_t bytes, c10::Device device,
    std::shared_ptr<comm::Communicator> group) {
  return std::make_unique<CollectiveRun>(collective, bytes, device,
                                         std::move(group));
}

}  // namespace fsdp::benchmarks
