// What a training run has to say at its end.
#ifndef EXAMPLES_GPT_REPORT_H_
#define EXAMPLES_GPT_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "base/json.h"
#include "examples/gpt/options.h"

namespace gpt {

struct CollectiveCounts {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t bytes_gathered = 0;
  int64_t bytes_reduced = 0;
};

struct Report {
  TrainOptions options;
  int world = 1;
  int64_t num_parameters = 0;
  std::vector<double> losses;        // mean over the ranks, every step
  std::vector<double> loss_rank0;    // every step
  std::vector<double> step_seconds;  // of the timed steps, at least one
  std::vector<int64_t> peak_rss_mb;  // by rank
  CollectiveCounts collectives;      // in the timed steps
  absl::optional<double> validation_loss;
};

// One object with the keys of benchmarks/peers/peer_gpt.py and more.
fsdp::Json ToJson(const Report& report);

// A small table for people.
std::string ToTable(const Report& report);

}  // namespace gpt

#endif  // EXAMPLES_GPT_REPORT_H_
