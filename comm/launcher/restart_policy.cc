#include "comm/launcher/restart_policy.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::comm {
namespace {

// An attempt that lasts this long has got on, if nobody counts progress.
constexpr absl::Duration kLongEnough = absl::Minutes(1);

RestartPolicy::Decision None(std::string why) {
  return {0, absl::ZeroDuration(), std::move(why)};
}

}  // namespace

RestartPolicy::RestartPolicy(const RestartOptions& options)
    : options_(options) {
  if (options_.progress) progress_ = options_.progress();
}

bool RestartPolicy::HasGotOn(const LaunchAttempt& attempt) {
  if (!options_.progress) return attempt.lasted >= kLongEnough;
  const int64_t before = std::exchange(progress_, options_.progress());
  return progress_ > before;
}

absl::Duration RestartPolicy::Pause() const {
  absl::Duration pause = options_.pause;
  for (int i = 1; i < without_progress_ && pause < options_.longest_pause;
       ++i) {
    pause *= 2;
  }
  return std::min(pause, options_.longest_pause);
}

RestartPolicy::Decision RestartPolicy::Decide(const LaunchAttempt& attempt) {
  if (options_.max_restarts == 0) return {};
  without_progress_ = HasGotOn(attempt) ? 0 : without_progress_ + 1;
  const ProcessEnd& end = attempt.ranks[attempt.first_failed_rank].end;
  if (StopSignalOf(end) != 0) {
    return None(absl::StrCat("exit code ", end.exit_code,
                             " says that it was told to stop"));
  }
  if (end.signal == 0 && end.exit_code == kUsageErrorExitCode) {
    return None(absl::StrCat("exit code ", kUsageErrorExitCode,
                             " says that it would fail again"));
  }
  if (restarts_ >= options_.max_restarts) {
    return None(absl::StrCat("it was restarted ", restarts_,
                             restarts_ == 1 ? " time" : " times",
                             ", as often as it may be"));
  }
  if (without_progress_ >= options_.max_without_progress) {
    return None(absl::StrCat(
        without_progress_, " attempts in a row have not got on: ",
        options_.progress ? "nothing new was saved" : "each failed in a minute",
        "; what they have printed says why"));
  }
  const int ranks = options_.on_restart
                        ? options_.on_restart(attempt)
                        : static_cast<int>(attempt.ranks.size());
  if (ranks < std::max(1, options_.min_ranks)) {
    return None(absl::StrCat(std::max(0, ranks),
                             ranks == 1 ? " rank" : " ranks",
                             " would be left, and it needs at least ",
                             std::max(1, options_.min_ranks)));
  }
  ++restarts_;
  return {ranks, Pause(), std::string()};
}

}  // namespace fsdp::comm
