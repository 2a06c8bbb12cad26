#include "testing/gpt/report/progress.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gpt {
namespace {

// Returns "1:05" or "2:00:09", for example.
std::string Clock(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(duration);
  if (seconds < 3600) {
    return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
  }
  return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60,
                         seconds % 60);
}

}  // namespace

Progress::Progress(Options options, std::ostream* out)
    : options_(options), out_(out) {}

void Progress::Update(int64_t step, double loss, absl::Time now) {
  if (first_time_ == absl::InfinitePast()) {
    first_time_ = now;
    first_step_ = step;
  }
  const bool last = step == options_.num_steps;
  if (!last && now - last_shown_ < options_.interval) return;
  last_shown_ = now;
  std::string line = Line(step, loss, now);
  if (options_.columns.has_value()) {
    // A line that wraps could not be rewritten.
    line = line.substr(0, std::max(1, *options_.columns - 1));
    // Blanks cover what is left of a longer line.
    const size_t blanks = std::max(line.size(), open_width_) - line.size();
    *out_ << "\r" << line << std::string(blanks, ' ') << std::flush;
    open_width_ = line.size();
  } else {
    *out_ << line << "\n" << std::flush;
  }
}

void Progress::Finish() {
  if (open_width_ > 0) *out_ << "\n" << std::flush;
  open_width_ = 0;
}

std::string Progress::Line(int64_t step, double loss, absl::Time now) const {
  std::string line =
      absl::StrFormat("step %d/%d  loss %.3f", step, options_.num_steps, loss);
  const double seconds = absl::ToDoubleSeconds(now - first_time_);
  if (step == first_step_ || seconds <= 0) return line;
  const double steps_per_second =
      static_cast<double>(step - first_step_) / seconds;
  absl::StrAppendFormat(
      &line, "  %.0f tokens/s",
      steps_per_second * static_cast<double>(options_.tokens_per_step));
  if (step == options_.num_steps) return line;
  const auto left = absl::Seconds(
      static_cast<double>(options_.num_steps - step) / steps_per_second);
  absl::StrAppend(&line, "  ETA ", Clock(left));
  return line;
}

}  // namespace gpt
