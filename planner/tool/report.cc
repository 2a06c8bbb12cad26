#include "planner/tool/report.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp::simulator {
namespace {

constexpr double kMilli = 1e-3;

double Percent(double part, double whole) {
  return whole == 0 ? 0 : 100 * part / whole;
}

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

double Mebibytes(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 20);
}

}  // namespace

std::string StepTable(const std::vector<ReportRow>& rows) {
  std::string text = absl::StrFormat(
      "time of a step, ms\n%8s %7s %10s %10s %10s %10s %10s %10s %9s\n",
      "ranks", "copies", "step", "compute", "copying", "optimizer",
      "exp.gather", "exp.reduce", "exposed");
  for (const ReportRow& row : rows) {
    const Spent& total = row.step.total;
    absl::StrAppendFormat(
        &text, "%8d %7d %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f %8.1f%%\n",
        row.ranks, row.copies, row.step.seconds / kMilli,
        total.compute / kMilli, total.copies / kMilli, total.optimizer / kMilli,
        total.exposed_gather / kMilli, total.exposed_reduce / kMilli,
        Percent(total.exposed(), row.step.seconds));
  }
  absl::StrAppendFormat(&text,
                        "\nof each rank: MB it sends, MiB it holds at most\n"
                        "%8s %10s %10s %10s %10s %10s %10s %10s %10s\n",
                        "ranks", "sent", "shards", "gradients", "optimizer",
                        "gathered", "parts", "reducing", "together");
  for (const ReportRow& row : rows) {
    const MemoryPlan& peak = row.step.peak;
    absl::StrAppendFormat(
        &text, "%8d %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f\n",
        row.ranks, Megabytes(row.step.total.bytes()), Mebibytes(peak.shards),
        Mebibytes(peak.gradients), Mebibytes(peak.optimizer),
        Mebibytes(peak.gathered), Mebibytes(peak.parts),
        Mebibytes(peak.in_flight), Mebibytes(peak.total()));
  }
  return text;
}

std::string UnitTable(const ModelShape& model, const StepResult& step) {
  std::string text =
      absl::StrFormat("%-24s %10s %10s %10s %10s %10s %10s %10s\n",
                      "unit: ms, MB sent", "compute", "copying", "gathering",
                      "exposed", "reducing", "exposed", "sent");
  const auto add = [&text](absl::string_view name, const Spent& spent) {
    absl::StrAppendFormat(
        &text, "%-24s %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f %10.1f\n", name,
        spent.compute / kMilli, spent.copies / kMilli, spent.gather / kMilli,
        spent.exposed_gather / kMilli, spent.reduce / kMilli,
        spent.exposed_reduce / kMilli, Megabytes(spent.bytes()));
  };
  for (size_t i = 0; i < step.units.size(); ++i) {
    add(model.units[i].name, step.units[i]);
  }
  add("all", step.total);
  return text;
}

std::string StepCsv(const std::vector<ReportRow>& rows) {
  std::string text =
      "ranks,copies,step_seconds,compute_seconds,copying_seconds,"
      "optimizer_seconds,gather_seconds,reduce_seconds,exposed_gather_seconds,"
      "exposed_reduce_seconds,gathered_bytes,reduced_bytes,replicated_bytes,"
      "shards,gradients,optimizer,gathered,parts,reduce_buffers,memory\n";
  for (const ReportRow& row : rows) {
    const Spent& total = row.step.total;
    const MemoryPlan& peak = row.step.peak;
    absl::StrAppendFormat(
        &text, "%d,%d,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,", row.ranks,
        row.copies, row.step.seconds, total.compute, total.copies,
        total.optimizer, total.gather, total.reduce, total.exposed_gather,
        total.exposed_reduce);
    absl::StrAppendFormat(&text, "%d,%d,%d,%d,%d,%d,%d,%d,%d,%d\n",
                          total.gathered_bytes, total.reduced_bytes,
                          total.replicated_bytes, peak.shards, peak.gradients,
                          peak.optimizer, peak.gathered, peak.parts,
                          peak.in_flight, peak.total());
  }
  return text;
}

}  // namespace fsdp::simulator
