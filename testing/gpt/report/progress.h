// Shows how training goes: one live line on a terminal, a line now and then
// elsewhere.
#ifndef TESTING_GPT_REPORT_PROGRESS_H_
#define TESTING_GPT_REPORT_PROGRESS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "absl/time/time.h"

namespace gpt {

// Thread-compatible.
class Progress {
 public:
  struct Options {
    // Width of the terminal that `out` is: one line is rewritten after a '\r'.
    std::optional<int> columns;
    int64_t num_steps = 0;
    int64_t tokens_per_step = 0;  // of all ranks
    // Time between two lines, or two states of the live line.
    absl::Duration interval = absl::Seconds(10);
  };

  // `out` outlives it.
  Progress(Options options, std::ostream* out);

  // Tells that `step` steps are done, the last one with `loss`.
  void Update(int64_t step, double loss, absl::Time now);
  // Ends the live line; later output begins on a new one.
  void Finish();

 private:
  std::string Line(int64_t step, double loss, absl::Time now) const;

  const Options options_;
  std::ostream* const out_;
  // The rate is measured from the end of the first step, which allocates.
  absl::Time first_time_ = absl::InfinitePast();
  int64_t first_step_ = 0;
  absl::Time last_shown_ = absl::InfinitePast();
  size_t open_width_ = 0;  // of the live line; 0: there is none
};

}  // namespace gpt

#endif  // TESTING_GPT_REPORT_PROGRESS_H_
