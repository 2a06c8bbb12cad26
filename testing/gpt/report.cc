#include "testing/gpt/report.h"

#include <algorithm>

namespace gpt {
namespace {

using ::fsdp::Json;
using ::fsdp::RestingKind;
// Is indexed by fsdp::RestingKind.
using BytesByKind = std::array<int64_t, fsdp::kNumRestingKinds>;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

// Returns null for no numbers.
template <typename Function>
Json OfAny(const std::vector<double>& values, const Function& function) {
  return values.empty() ? Json() : Json(function(values));
}

double TokensPerSecond(const Report& report) {
  const auto tokens = static_cast<double>(report.world * report.options.batch *
                                          report.options.model.seq);
  return tokens / Median(report.step_seconds);
}

template <typename Number>
double PerStep(Number total, const Report& report) {
  return static_cast<double>(total) /
         static_cast<double>(std::max<size_t>(1, report.step_seconds.size()));
}

Json PerStepByKind(const BytesByKind& bytes, const Report& report) {
  Json::Object json;
  for (int kind = 0; kind < fsdp::kNumRestingKinds; ++kind) {
    json.emplace_back(fsdp::ToString(static_cast<RestingKind>(kind)),
                      PerStep(bytes[kind], report));
  }
  return json;
}

std::vector<double> WaitsPerStep(const Report& report) {
  std::vector<double> waits;
  for (const double seconds : report.offload->waited_seconds) {
    waits.push_back(PerStep(seconds, report));
  }
  return waits;
}

Json OffloadToJson(const Report& report) {
  const OffloadReport& offload = *report.offload;
  Json::Object json;
  for (int i = 0; i < fsdp::kNumRestingKinds; ++i) {
    const auto kind = static_cast<RestingKind>(i);
    const fsdp::OffloadPlan::Bytes& bytes = offload.plan.of(kind);
    json.emplace_back(
        fsdp::ToString(kind),
        Json::Object{
            {"device", bytes.device}, {"cpu", bytes.cpu}, {"ssd", bytes.ssd}});
  }
  json.emplace_back("buffers", offload.plan.buffer_bytes);
  json.emplace_back("memory_budget", offload.plan.budget);
  json.emplace_back("read_per_step", PerStepByKind(offload.bytes_read, report));
  json.emplace_back("written_per_step",
                    PerStepByKind(offload.bytes_written, report));
  json.emplace_back("waited_seconds_per_step", WaitsPerStep(report));
  return json;
}

}  // namespace

Json ToJson(const Report& report, bool of_steps) {
  const auto median_ms = [](auto& seconds) { return Median(seconds) * 1e3; };
  const auto min_ms = [](auto& seconds) {
    return *std::min_element(seconds.begin(), seconds.end()) * 1e3;
  };
  const auto rate = [&](auto&) { return TokensPerSecond(report); };
  const auto first = [](auto& losses) { return losses.front(); };
  const auto last = [](auto& losses) { return losses.back(); };
  const bool sharded = report.options.sharding.has_value();
  Json::Object json = {
      {"impl", sharded ? "libtorch_fsdp" : "none"},
      {"world", report.world},
      {"params", report.num_parameters},
      {"batch", report.options.batch},
      {"seq", report.options.model.seq},
      {"step_ms", OfAny(report.step_seconds, median_ms)},
      {"min_ms", OfAny(report.step_seconds, min_ms)},
      {"tok_s", OfAny(report.step_seconds, rate)},
      {"peak_rss_mb", report.peak_rss_mb},
      {"loss0", OfAny(report.loss_rank0, first)},
      {"loss", OfAny(report.loss_rank0, last)},
      {"all_gathers", report.collectives.all_gathers},
      {"reduce_scatters", report.collectives.reduce_scatters},
      {"bytes_gathered", report.collectives.bytes_gathered},
      {"bytes_reduced", report.collectives.bytes_reduced},
  };
  if (of_steps) {
    json.emplace_back("losses", report.losses);
    json.emplace_back("loss_rank0", report.loss_rank0);
  }
  if (report.offload.has_value()) {
    json.emplace_back("offload", OffloadToJson(report));
  }
  return json;
}

}  // namespace gpt
