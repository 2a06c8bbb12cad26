// The report of a training run at its end.
#ifndef TESTING_GPT_REPORT_H_
#define TESTING_GPT_REPORT_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/json.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_plan.h"
#include "testing/gpt/options.h"

namespace gpt {

struct CollectiveCounts {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t bytes_gathered = 0;
  int64_t bytes_reduced = 0;
};

struct OffloadReport {
  fsdp::OffloadPlan plan;  // of one rank
  // By fsdp::RestingKind, summed over the ranks.
  std::array<int64_t, fsdp::kNumRestingKinds> bytes_read = {};
  std::array<int64_t, fsdp::kNumRestingKinds> bytes_written = {};
  std::vector<double> waited_seconds;  // for the disk, by rank
};

struct Report {
  TrainOptions options;
  int world = 1;
  int64_t num_parameters = 0;
  std::vector<double> losses;        // mean over the ranks, every step
  std::vector<double> loss_rank0;    // every step
  std::vector<double> step_seconds;  // of the timed steps
  // By rank. A rank counts all pages that it shares with others.
  std::vector<int64_t> peak_rss_mb;
  CollectiveCounts collectives;          // in the timed steps
  std::optional<OffloadReport> offload;  // none if nothing may rest elsewhere
};

// Returns an object with the keys of benchmarks/peers/peer_gpt.py and more,
// `of_steps` with the losses of each. Values that no step has given are null,
// as in a run that had finished before.
fsdp::Json ToJson(const Report& report, bool of_steps);

}  // namespace gpt

#endif  // TESTING_GPT_REPORT_H_
