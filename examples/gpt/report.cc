#include "examples/gpt/report.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace gpt {
namespace {

using ::fsdp::Json;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

double TokensPerSecond(const Report& report) {
  const double tokens = static_cast<double>(report.world) *
                        report.options.batch * report.options.model.seq;
  return tokens / Median(report.step_seconds);
}

void AppendRow(absl::string_view name, absl::string_view value,
               std::string& table) {
  absl::StrAppendFormat(&table, "  %-16s %s\n", name, value);
}

}  // namespace

Json ToJson(const Report& report) {
  const double step_ms = Median(report.step_seconds) * 1e3;
  const double min_ms = *std::min_element(report.step_seconds.begin(),
                                          report.step_seconds.end()) *
                        1e3;
  const bool sharded = report.options.sharding != Sharding::kNone;
  Json::Object json = {
      {"impl", sharded ? "libtorch_fsdp" : "none"},
      {"world", report.world},
      {"params", report.num_parameters},
      {"bf16", report.options.precision == ComputeDtype::kBFloat16},
      {"batch", report.options.batch},
      {"seq", report.options.model.seq},
      {"step_ms", step_ms},
      {"min_ms", min_ms},
      {"tok_s", TokensPerSecond(report)},
      {"peak_rss_mb", report.peak_rss_mb},
      {"loss0", report.loss_rank0.front()},
      {"loss", report.loss_rank0.back()},
      {"losses", report.losses},
      {"loss_rank0", report.loss_rank0},
      {"all_gathers", report.collectives.all_gathers},
      {"reduce_scatters", report.collectives.reduce_scatters},
      {"bytes_gathered", report.collectives.bytes_gathered},
      {"bytes_reduced", report.collectives.bytes_reduced},
  };
  if (report.validation_loss.has_value()) {
    json.emplace_back("validation_loss", *report.validation_loss);
  }
  return json;
}

std::string ToTable(const Report& report) {
  std::string table = absl::StrFormat(
      "%d steps on %d rank%s, %d parameters\n", report.losses.size(),
      report.world, report.world == 1 ? "" : "s", report.num_parameters);
  AppendRow("training loss",
            absl::StrFormat("%.3f, at first %.3f (nats per token)",
                            report.losses.back(), report.losses.front()),
            table);
  if (report.validation_loss.has_value()) {
    AppendRow("validation loss",
              absl::StrFormat("%.3f", *report.validation_loss), table);
  }
  AppendRow("step, median",
            absl::StrFormat("%.1f ms", Median(report.step_seconds) * 1e3),
            table);
  AppendRow("tokens/s", absl::StrFormat("%.0f", TokensPerSecond(report)),
            table);
  AppendRow(
      "peak memory",
      absl::StrCat(absl::StrJoin(report.peak_rss_mb, ", "), " MB, by rank"),
      table);
  const double steps = report.step_seconds.size();
  const CollectiveCounts& counts = report.collectives;
  AppendRow("per step",
            absl::StrFormat("%g all-gathers (%.1f MB), %g reduce-scatters "
                            "(%.1f MB)",
                            counts.all_gathers / steps,
                            counts.bytes_gathered / steps / 1e6,
                            counts.reduce_scatters / steps,
                            counts.bytes_reduced / steps / 1e6),
            table);
  return table;
}

}  // namespace gpt
