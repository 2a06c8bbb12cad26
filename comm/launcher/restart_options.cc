#include "comm/launcher/restart_options.h"

#include <signal.h>

#include <cstddef>

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

}  // namespace fsdp::comm
