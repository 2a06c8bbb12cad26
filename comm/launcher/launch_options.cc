#include "comm/launcher/launch_options.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace fsdp::comm {
namespace {

constexpr char kStopSignal[] = "libtorch_fsdp/stop_signal";

std::string EndText(const RankEnd& rank) {
  if (rank.end.signal == 0) {
    const int stopped_by = StopSignalOf(rank.end);
    return absl::StrCat(
        "exited with code ", rank.end.exit_code,
        rank.end.exit_code == kPeerFailedExitCode ? " (another rank had failed)"
                                                  : "",
        stopped_by == 0
            ? ""
            : absl::StrCat(" (told to stop by ", SignalText(stopped_by), ")"));
  }
  return absl::StrCat(
      rank.forced ? "ended by the launcher with " : "killed by ",
      SignalText(rank.end.signal));
}

// Returns "rank 1 exited with code 1" or "ranks 0, 3 were killed by signal 9
// (SIGKILL)".
std::string GroupText(const std::vector<int>& ranks, const RankEnd& end) {
  const bool is_one = ranks.size() == 1;
  const char* verb = is_one ? "was " : "were ";
  return absl::StrCat(is_one ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                      " ", end.end.signal == 0 ? "" : verb, EndText(end));
}

// Appends "rank 2 was killed by ..." and "then ranks 0, 1 exited ...".
void AppendEnds(const LaunchAttempt& attempt, std::vector<std::string>* parts) {
  const std::vector<RankEnd>& ranks = attempt.ranks;
  const int first_failed = attempt.first_failed_rank;
  if (first_failed >= 0) {
    parts->push_back(GroupText({first_failed}, ranks[first_failed]));
  }
  std::map<std::string, std::vector<int>> others;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (static_cast<int>(rank) == first_failed) continue;
    others[EndText(ranks[rank])].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> groups;
  groups.reserve(others.size());
  for (const auto& [end, members] : others) {
    groups.push_back(GroupText(members, ranks[members[0]]));
  }
  if (groups.empty()) return;
  parts->push_back(
      absl::StrCat(parts->empty() ? "" : "then ", absl::StrJoin(groups, ", ")));
}

int CodeOf(const ProcessEnd& end) {
  return end.signal != 0 ? 128 + end.signal : end.exit_code;
}

// Returns whether a rank failed instead of stopping when the job was told to.
bool HasFailed(const RankEnd& rank) {
  const int code = CodeOf(rank.end);
  return rank.was_told && !rank.forced && code != EXIT_SUCCESS &&
         code != kPeerFailedExitCode && StopSignalOf(rank.end) == 0;
}

std::string AttemptLine(size_t number, const LaunchAttempt& attempt,
                        absl::string_view text) {
  const size_t ranks = attempt.ranks.size();
  return absl::StrCat(
      "attempt ", number, " (", ranks, ranks == 1 ? " rank, " : " ranks, ",
      absl::FormatDuration(absl::Trunc(attempt.lasted, absl::Seconds(1))),
      "): ", text);
}

}  // namespace

std::string SignalText(int signal) {
  const char* const name = sigabbrev_np(signal);
  return name == nullptr ? absl::StrCat("signal ", signal)
                         : absl::StrCat("signal ", signal, " (SIG", name, ")");
}

absl::Status StoppedError(int signal, absl::string_view text) {
  absl::Status status = absl::CancelledError(text);
  status.SetPayload(kStopSignal, absl::Cord(absl::StrCat(signal)));
  return status;
}

int ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return EXIT_SUCCESS;
  const std::optional<absl::Cord> signal = status.GetPayload(kStopSignal);
  int number = 0;
  if (signal.has_value() && absl::SimpleAtoi(std::string(*signal), &number)) {
    return 128 + number;
  }
  if (absl::IsAborted(status)) return kPeerFailedExitCode;
  return absl::IsInvalidArgument(status) ? kUsageErrorExitCode : EXIT_FAILURE;
}

int StopSignalOf(const ProcessEnd& end) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    if (end.signal == 0 && end.exit_code == 128 + signal) return signal;
  }
  return 0;
}

std::string LaunchAttempt::ToString() const {
  std::vector<std::string> parts;
  AppendEnds(*this, &parts);
  return absl::StrJoin(parts, "; ");
}

int LaunchReport::exit_code() const {
  if (interrupt_signal != 0) {
    const auto failed = absl::c_find_if(ranks, HasFailed);
    if (failed != ranks.end()) return CodeOf(failed->end);
    const bool is_whole = absl::c_all_of(
        ranks, [](const RankEnd& rank) { return CodeOf(rank.end) == 0; });
    if (!is_whole) return 128 + interrupt_signal;
  } else if (first_failed_rank >= 0) {
    return CodeOf(ranks[first_failed_rank].end);
  }
  return output_errno == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

std::string LaunchReport::ToString() const {
  std::vector<std::string> parts;
  if (interrupt_signal != 0) {
    parts.push_back(
        absl::StrCat("interrupted by ", SignalText(interrupt_signal)));
  }
  AppendEnds(*this, &parts);
  if (output_errno != 0) {
    parts.push_back(absl::StrCat("what they printed could not be written: ",
                                 std::strerror(output_errno)));
  }
  const std::string last = absl::StrJoin(parts, "; ");
  std::vector<std::string> lines;
  lines.reserve(failed_attempts.size() + 1);
  for (const LaunchAttempt& attempt : failed_attempts) {
    lines.push_back(AttemptLine(lines.size() + 1, attempt, attempt.ToString()));
  }
  lines.push_back(lines.empty() ? last
                                : AttemptLine(lines.size() + 1, *this, last));
  if (!gave_up.empty())
    lines.push_back(absl::StrCat("not restarted: ", gave_up));
  return absl::StrJoin(lines, "\n");
}

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

namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGUSR1};

// A handler can reach nothing but variables of static storage.
std::atomic<const StopRequest*> current{nullptr};
std::atomic<int> received{0};
std::atomic<int64_t> first_end{0};  // when SIGINT or SIGTERM came; 0: not yet
std::atomic<int64_t> apart_ns{0};
static_assert(std::atomic<int>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free,
              "a signal handler must not take a lock");

void Note(int number) {
  int none = 0;
  received.compare_exchange_strong(none, number);
  if (number == SIGUSR1) return;
  timespec time = {};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  int64_t first = 0;
  if (first_end.compare_exchange_strong(first, now)) return;
  if (now - first < apart_ns) return;
  signal(number, SIG_DFL);
  raise(number);  // ends the process when this handler returns
}

}  // namespace

StopRequest::StopRequest(absl::Duration period, absl::Duration apart)
    : period_(period) {
  const StopRequest* none = nullptr;
  FSDP_CHECK(current.compare_exchange_strong(none, this));
  received = 0;
  first_end = 0;
  apart_ns = absl::ToInt64Nanoseconds(apart);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    // Launchers start ranks with SIGUSR1 ignored until they handle it.
    const bool is_ignored = previous_[i].sa_handler == SIG_IGN;
    if (is_ignored && kSignals[i] != SIGUSR1) continue;
    struct sigaction note = {};
    note.sa_handler = Note;
    // Interrupted calls on files and sockets go on.
    note.sa_flags = SA_RESTART;
    sigaction(kSignals[i], &note, nullptr);
  }
  // Launchers start ranks with SIGUSR1 blocked.
  sigset_t early;
  sigemptyset(&early);
  sigaddset(&early, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &early, nullptr);
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction now = {};
    sigaction(kSignals[i], nullptr, &now);
    if (now.sa_handler == Note) sigaction(kSignals[i], &previous_[i], nullptr);
  }
  current = nullptr;
}

const StopRequest* StopRequest::Current() { return current; }

int StopRequest::signal() const { return received; }

void IgnoreQuestions() {
  for (const int question : {SIGQUIT, SIGUSR1}) {
    struct sigaction action = {};
    sigaction(question, nullptr, &action);
    const bool has_handler = (action.sa_flags & SA_SIGINFO) != 0;
    if (!has_handler && action.sa_handler == SIG_DFL) signal(question, SIG_IGN);
  }
}

}  // namespace fsdp::comm
