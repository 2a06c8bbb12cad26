#include "replicas/launcher/replicas_report.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/processes/process_end.h"

namespace fsdp::comm {

int ReplicasReport::exit_code() const {
  const bool was_told = interrupt_signal != 0;
  if (!was_told && (keeper_was_lost || output_errno != 0)) return EXIT_FAILURE;
  const bool any_is_done =
      std::any_of(replicas.begin(), replicas.end(), [](const ProcessEnd& end) {
        return end.signal == 0 && end.exit_code == 0;
      });
  if (any_is_done || last_failed_replica < 0) return EXIT_SUCCESS;
  const ProcessEnd& last = replicas[static_cast<size_t>(last_failed_replica)];
  if (last.signal == 0) return last.exit_code;
  return 128 + (was_told ? interrupt_signal : last.signal);
}

std::string ReplicasReport::ToString() const {
  std::vector<std::string> parts;
  if (interrupt_signal != 0) {
    parts.push_back(
        absl::StrCat("interrupted by ", SignalText(interrupt_signal)));
  }
  if (keeper_was_lost) {
    parts.push_back("the keeper of the replicas had ended");
  }
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t replica = 0; replica < replicas.size(); ++replica) {
    const ProcessEnd& end = replicas[replica];
    groups[end.signal != 0 ? absl::StrCat("killed by ", SignalText(end.signal))
                           : absl::StrCat("exited with code ", end.exit_code)]
        .push_back(replica);
  }
  for (const auto& [end, members] : groups) {
    parts.push_back(absl::StrCat(members.size() == 1 ? "replica " : "replicas ",
                                 absl::StrJoin(members, ", "), " ", end));
  }
  if (output_errno != 0) {
    parts.push_back(absl::StrCat("what they printed could not be written: ",
                                 std::strerror(output_errno)));
  }
  return absl::StrJoin(parts, "; ");
}

}  // namespace fsdp::comm
