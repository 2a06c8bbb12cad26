#include "examples/llama/training/progress.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ios>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace llama {

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
