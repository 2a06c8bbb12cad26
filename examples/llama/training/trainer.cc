#include "examples/llama/training/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ios>
#include <limits>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/launcher/launch_options.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace llama {
namespace {

torch::optim::AdamWOptions OptionsOf(const TrainerOptions& options) {
  return torch::optim::AdamWOptions(options.learning_rate)
      .betas({0.9, 0.95})
      .weight_decay(options.weight_decay);
}

double CountTargets(const Batch& batch) {
  return batch.targets.ne(kNoTarget).sum().item<double>();
}

}  // namespace

Trainer::Trainer(Model model, TokenBatches* data,
                 std::shared_ptr<fsdp::comm::Communicator> ranks,
                 const TrainerOptions& options)
    : model_(std::move(model)),
      data_(*data),
      ranks_(std::move(ranks)),
      options_(options),
      optimizer_(fsdp::DecayGroups(*model_, OptionsOf(options)),
                 OptionsOf(options)),
      scheduler_(optimizer_, options.schedule) {}

absl::Status Trainer::Capture(const fsdp::DeviceGraphMaker& make_graph) {
  fsdp::CaptureOptions options;
  options.make_graph = make_graph;
  const auto step = [this](const Inputs& inputs) -> absl::StatusOr<at::Tensor> {
    const std::vector<DocumentStarts> none(options_.micro_batches);
    FSDP_ASSIGN_OR_RETURN(at::Tensor numbers, Gradients(inputs, none));
    optimizer_.step();
    optimizer_.zero_grad();
    return numbers;
  };
  FSDP_ASSIGN_OR_RETURN(
      captured_, fsdp::CapturedStep::Make(*model_, optimizer_, step, options));
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Trainer::Step(int64_t step,
                                         fsdp::checkpoint::RunGuard* guard) {
  std::vector<Batch> batches;
  absl::Status read;
  for (int64_t i = 0; i < options_.micro_batches && read.ok(); ++i) {
    absl::StatusOr<Batch> batch = data_.Next();
    read = batch.status();
    if (batch.ok()) batches.push_back(*std::move(batch));
  }
  FSDP_RETURN_IF_ERROR(
      fsdp::comm::Agree(*ranks_, read, "reading a batch",
                        absl::Now() + ranks_->default_timeout()));
  StepResult result;
  double targets = 0;
  std::vector<DocumentStarts> starts;
  for (const Batch& batch : batches) {
    targets += CountTargets(batch);
    result.tokens += batch.tokens.numel() * ranks_->world_size();
    starts.push_back(batch.starts);
    FSDP_CHECK(captured_ == nullptr || starts.back().empty());
  }
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  result.targets = static_cast<int64_t>(targets);
  result.learning_rate = optimizer_.param_groups()[0].options().get_lr();
  Inputs inputs;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus(
      "copying a batch", [&] { inputs = InputsOf(batches, targets); }));
  FSDP_ASSIGN_OR_RETURN(at::Tensor numbers, captured_ != nullptr
                                                ? captured_->Run(inputs)
                                                : Gradients(inputs, starts));
  FSDP_ASSIGN_OR_RETURN(numbers, Await(numbers));
  const double loss = numbers.const_data_ptr<double>()[0];
  result.grad_norm = numbers.const_data_ptr<double>()[1];
  if (guard != nullptr) {
    FSDP_ASSIGN_OR_RETURN(const bool may_step,
                          guard->MayStep(step + 1, loss, result.grad_norm));
    result.left_out = !may_step;
    result.loss = guard->mean_loss();
  } else {
    FSDP_ASSIGN_OR_RETURN(result.loss, fsdp::comm::Mean(*ranks_, loss));
  }
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("a step of the optimizer", [&] {
    if (captured_ == nullptr) {
      if (!result.left_out) optimizer_.step();
      optimizer_.zero_grad();
    }
    if (!result.left_out) scheduler_.step();
  }));
  return result;
}

Trainer::Inputs Trainer::InputsOf(const std::vector<Batch>& batches,
                                  double all_targets) const {
  std::vector<at::Tensor> tokens;
  std::vector<at::Tensor> targets;
  std::vector<float> weights;
  for (const Batch& batch : batches) {
    tokens.push_back(batch.tokens);
    targets.push_back(batch.targets);
    // Gradients become the mean over ranks, while the sum is wanted.
    weights.push_back(static_cast<float>(CountTargets(batch) / all_targets *
                                         ranks_->world_size()));
  }
  return {fsdp::CopyToDevice(at::stack(tokens), options_.device),
          fsdp::CopyToDevice(at::stack(targets), options_.device),
          fsdp::CopyToDevice(at::tensor(weights), options_.device)};
}

absl::StatusOr<at::Tensor> Trainer::Gradients(
    const Inputs& inputs, const std::vector<DocumentStarts>& starts) {
  at::Tensor sum;
  for (int64_t i = 0; i < options_.micro_batches; ++i) {
    std::optional<fsdp::NoSyncScope> no_sync;
    if (options_.no_sync && i + 1 < options_.micro_batches) {
      no_sync.emplace(model_->NoSync());
    }
    at::Tensor loss;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("forward", [&] {
      loss =
          model_->forward(inputs[0][i], starts[i], inputs[1][i]) * inputs[2][i];
      const at::Tensor value = loss.detach().to(at::kDouble);
      sum = sum.defined() ? sum + value : value;
    }));
    FSDP_RETURN_IF_ERROR(model_->Backward(loss));
  }
  // A norm of infinity only measures.
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor norm,
      model_->ClipGradNorm(options_.max_grad_norm > 0
                               ? options_.max_grad_norm
                               : std::numeric_limits<double>::infinity()));
  at::Tensor numbers;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("the norm of gradients", [&] {
    numbers = at::stack({sum, norm.to(at::kDouble)});
  }));
  return numbers;
}

absl::StatusOr<at::Tensor> Trainer::Await(const at::Tensor& numbers) {
  // Only collectives of a replay have no deadline of their own.
  const absl::Time deadline = captured_ != nullptr
                                  ? absl::Now() + ranks_->default_timeout()
                                  : absl::InfiniteFuture();
  fsdp::HostCopy here;
  bool is_here = false;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("reading the loss", [&] {
    here = fsdp::CopyToHost(numbers);
    is_here = here.is_there.Wait(deadline);
  }));
  if (is_here) return here.values;
  absl::Status late = absl::DeadlineExceededError(
      "reading the loss: the device has not computed it");
  ranks_->Abort(late);
  return late;
}

absl::StatusOr<double> Trainer::Evaluate(const EvaluationBatches& data) {
  const c10::NoGradGuard no_grad;
  model_->eval();
  const absl::Cleanup train = [this] { model_->train(); };
  at::Tensor losses =
      at::zeros({}, at::TensorOptions(at::kDouble).device(options_.device));
  double sum = 0;
  double targets = 0;
  for (int64_t i = 0; i < data.num_batches(); ++i) {
    absl::StatusOr<Batch> batch = data.Read(i);
    const auto* const stop = fsdp::comm::StopRequest::Current();
    if (batch.ok() && stop != nullptr && stop->requested()) {
      batch = absl::CancelledError("the run is told to stop");
    }
    FSDP_RETURN_IF_ERROR(
        fsdp::comm::Agree(*ranks_, batch.status(), "an evaluation",
                          absl::Now() + ranks_->default_timeout()));
    const double count = CountTargets(*batch);
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("evaluation", [&] {
      const at::Tensor loss = model_->forward(
          fsdp::CopyToDevice(batch->tokens, options_.device), batch->starts,
          fsdp::CopyToDevice(batch->targets, options_.device));
      // The mean over no targets is not a number.
      if (count > 0) losses += loss.to(at::kDouble) * count;
    }));
    targets += count;
  }
  FSDP_RETURN_IF_ERROR(
      fsdp::TorchToStatus("evaluation", [&] { sum = losses.item<double>(); }));
  FSDP_ASSIGN_OR_RETURN(sum, fsdp::comm::Sum(*ranks_, sum));
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  return sum / targets;
}

// --- Progress ----------------------------------------------------------------

using ::fsdp::Json;

namespace {

void AddPeaks(c10::Device device, Json::Object& line) {
  if (device.is_cpu()) return;
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr) return;
  const auto stats = allocator->getDeviceStats(device.index());
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  line.emplace_back("peak_allocated_mib",
                    stats.allocated_bytes[kAll].peak >> 20);
  line.emplace_back("peak_reserved_mib", stats.reserved_bytes[kAll].peak >> 20);
}

}  // namespace

Progress::Progress(const ProgressOptions& options, std::ostream* out)
    : options_(options), out_(*out) {}

absl::Status Progress::Open() {
  if (options_.metrics.empty()) return absl::OkStatus();
  metrics_.open(options_.metrics, std::ios::app);
  if (metrics_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--metrics=", options_.metrics, ": ", std::strerror(errno)));
}

void Progress::WriteMetrics(Json::Object line) {
  if (!metrics_.is_open()) return;
  metrics_ << Json(std::move(line)).ToString() << "\n" << std::flush;
}

void Progress::GoesOn(int64_t step) {
  WriteMetrics({{"goes_on_after", step}});
  out_ << "goes on after step " << step << std::endl;
}

void Progress::Begin(absl::Time now) { begin_ = last_end_ = now; }

void Progress::Step(int64_t step, const StepResult& result, absl::Time now) {
  const double seconds = absl::ToDoubleSeconds(now - last_end_);
  last_end_ = now;
  if (first_end_ == absl::InfinitePast()) {
    first_end_ = now;
    first_step_ = step;
  }
  const auto tokens = static_cast<double>(result.tokens);
  const double rate = tokens / seconds;
  Json::Object line = {
      {"step", step}, {"loss", result.loss}, {"grad_norm", result.grad_norm}};
  if (result.left_out) line.emplace_back("left_out", true);
  line.insert(line.end(), {{"lr", result.learning_rate},
                           {"targets", result.targets},
                           {"tokens", result.tokens},
                           {"seconds", seconds},
                           {"tokens_per_second", rate},
                           {"tflops", rate * options_.flops_per_token / 1e12}});
  AddPeaks(options_.device, line);
  WriteMetrics(std::move(line));
  if (step % options_.every != 0 && step != options_.steps) return;
  const absl::Duration each =
      step == first_step_
          ? now - begin_
          : (now - first_end_) / static_cast<double>(step - first_step_);
  out_ << absl::StrFormat(
              "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %.0f tokens/s  %.3f "
              "TFLOP/s  %s left\n",
              step, options_.steps, result.loss, result.grad_norm,
              result.learning_rate, tokens / absl::ToDoubleSeconds(each),
              tokens / absl::ToDoubleSeconds(each) * options_.flops_per_token /
                  1e12,
              Clock(each * static_cast<double>(options_.steps - step)))
       << std::flush;
}

void Progress::Evaluated(int64_t step, double loss) {
  WriteMetrics(
      {{"step", step}, {"eval_loss", loss}, {"perplexity", std::exp(loss)}});
  out_ << absl::StrFormat("step %d: evaluation loss %.4f, perplexity %.2f\n",
                          step, loss, std::exp(loss))
       << std::flush;
}

absl::Status Progress::Finish() {
  if (!metrics_.is_open() || metrics_.flush()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "not all could be written to ", options_.metrics, ": is a disk full?"));
}

std::string Clock(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(duration);
  if (seconds < 3600) {
    return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
  }
  return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60,
                         seconds % 60);
}

double FlopsPerToken(const LlamaConfig& config, int64_t seq, bool frozen_base) {
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  const int64_t attention = config.hidden_size * (2 * queries + 2 * keys);
  const int64_t mlp = 3 * config.hidden_size * config.intermediate_size;
  const int64_t weights = config.num_hidden_layers * (attention + mlp) +
                          config.hidden_size * config.vocab_size;
  return static_cast<double>((frozen_base ? 4 : 6) * weights +
                             12 * config.num_hidden_layers * queries * seq);
}

}  // namespace llama
