#include "comm/launcher/launch_options.h"

#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "comm/launcher/launcher_report.h"

namespace fsdp::comm {

int RanksLeft(const LaunchAttempt& failed) {
  int left = 0;
  for (size_t rank = 0; rank < failed.ranks.size(); ++rank) {
    const RankEnd& end = failed.ranks[rank];
    const bool was_killed =
        end.end.signal != 0 && end.end.signal != SIGABRT && !end.forced;
    const bool is_first = static_cast<int>(rank) == failed.first_failed_rank;
    if (!was_killed && !is_first) ++left;
  }
  return left;
}

absl::Status CheckLaunchOptions(const LaunchOptions& options) {
  if (options.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", options.ranks, ": expected at least 1"));
  }
  if (options.argv.empty()) {
    return absl::InvalidArgumentError("argv is empty: expected the program");
  }
  const RestartOptions& restarts = options.restarts;
  if (restarts.max_restarts < 0) {
    return absl::InvalidArgumentError(absl::StrCat("restarts.max_restarts is ",
                                                   restarts.max_restarts,
                                                   ": expected at least 0"));
  }
  if (restarts.min_ranks > options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("restarts.min_ranks is ", restarts.min_ranks,
                     ": expected at most ranks, ", options.ranks));
  }
  return absl::OkStatus();
}

const char* FindVariable(const LaunchOptions& options, const char* name) {
  const auto& set = options.environment;
  const auto last = std::find_if(
      set.rbegin(), set.rend(),
      [name](const auto& variable) { return variable.first == name; });
  return last != set.rend() ? last->second.c_str() : std::getenv(name);
}

}  // namespace fsdp::comm
