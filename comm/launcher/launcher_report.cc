// LaunchReport: what became of the ranks, in words and as an exit code.

#include <signal.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "comm/launcher/launcher.h"

namespace fsdp::comm {
namespace {

std::string SignalText(int signal) {
  static constexpr struct {
    int signal;
    const char* name;
  } kNames[] = {
      {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},
      {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"},
      {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
      {SIGSEGV, "SIGSEGV"}, {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"},
      {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"},
      {SIGSYS, "SIGSYS"},
  };
  for (const auto& known : kNames) {
    if (known.signal == signal) {
      return absl::StrCat("signal ", signal, " (", known.name, ")");
    }
  }
  return absl::StrCat("signal ", signal);
}

std::string EndText(const RankEnd& rank) {
  if (rank.end.signal == 0) {
    return absl::StrCat("exited with code ", rank.end.exit_code,
                        rank.end.exit_code == kPeerFailedExitCode
                            ? " (another rank had failed)"
                            : "");
  }
  return absl::StrCat(
      rank.forced ? "ended by the launcher with " : "killed by ",
      SignalText(rank.end.signal));
}

// "rank 1 exited with code 1", "ranks 0, 3 were killed by signal 9 (SIGKILL)".
std::string GroupText(const std::vector<int>& ranks, const RankEnd& end) {
  const bool is_one = ranks.size() == 1;
  const char* verb = is_one ? "was " : "were ";
  return absl::StrCat(is_one ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                      " ", end.end.signal == 0 ? "" : verb, EndText(end));
}

}  // namespace

int ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return EXIT_SUCCESS;
  return absl::IsAborted(status) ? kPeerFailedExitCode : EXIT_FAILURE;
}

int LaunchReport::exit_code() const {
  if (interrupt_signal != 0) return 128 + interrupt_signal;
  if (first_failed_rank < 0) {
    return output_errno == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  const ProcessEnd& end = ranks[first_failed_rank].end;
  return end.signal != 0 ? 128 + end.signal : end.exit_code;
}

std::string LaunchReport::ToString() const {
  std::vector<std::string> parts;
  if (interrupt_signal != 0) {
    parts.push_back(
        absl::StrCat("interrupted by ", SignalText(interrupt_signal)));
  }
  if (first_failed_rank >= 0) {
    parts.push_back(GroupText({first_failed_rank}, ranks[first_failed_rank]));
  }
  std::map<std::string, std::vector<int>> others;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (static_cast<int>(rank) == first_failed_rank) continue;
    others[EndText(ranks[rank])].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> groups;
  groups.reserve(others.size());
  for (const auto& [end, members] : others) {
    groups.push_back(GroupText(members, ranks[members[0]]));
  }
  if (!groups.empty()) {
    parts.push_back(absl::StrCat(parts.empty() ? "" : "then ",
                                 absl::StrJoin(groups, ", ")));
  }
  if (output_errno != 0) {
    parts.push_back(absl::StrCat("what they printed could not be written: ",
                                 std::strerror(output_errno)));
  }
  return absl::StrJoin(parts, "; ");
}

}  // namespace fsdp::comm
