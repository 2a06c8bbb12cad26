#include <c10/core/ScalarType.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/output_file.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/peer_records.h"

namespace fsdp::comm {
namespace {

// Longer lists tell nobody anything.
constexpr size_t kMostBehind = 8;

// The position of a rank relative to a call of its group.
struct Standing {
  enum Where { kUnknown, kOutside, kBehind, kIn, kPast };
  Where where = kUnknown;
  uint64_t missing = 0;  // number of calls, if it is behind
};

Standing StandingOf(const SeenRank& seen, const GroupCall& call) {
  if (!seen.record) return {};
  const RankRecord& record = *seen.record;
  for (size_t group = 0; group < record.groups.size(); ++group) {
    if (record.groups[group].id != call.group) continue;
    const uint64_t calls = record.groups[group].calls;
    if (calls <= call.call) return {Standing::kBehind, call.call + 1 - calls};
    for (const OperationRecord& operation : record.operations) {
      if (operation.group != static_cast<int>(group) ||
          operation.call != call.call) {
        continue;
      }
      const bool is_over = operation.state == OperationState::kDone ||
                           operation.state == OperationState::kDropped;
      return {is_over ? Standing::kPast : Standing::kIn};
    }
    return {Standing::kPast};
  }
  return {Standing::kOutside};
}

absl::string_view KindName(OperationKind kind) {
  if (kind == OperationKind::kAllocate) return "allocation";
  if (kind == OperationKind::kFence) return "fence";
  static_assert(static_cast<int>(OperationKind::kSplit) ==
                static_cast<int>(Collective::kSplit));
  return CollectiveName(static_cast<Collective>(kind));
}

std::string DtypeText(int8_t dtype) {
  if (dtype < 0 || dtype >= static_cast<int8_t>(c10::ScalarType::NumOptions)) {
    return "";
  }
  return absl::StrCat(", ", DtypeName(static_cast<c10::ScalarType>(dtype)));
}

// Returns the time since, or 0 if none: clocks of hosts differ, and peers err.
int64_t Since(int64_t then_ns, int64_t now_ns) {
  return then_ns <= 0 || then_ns > now_ns ? 0 : now_ns - then_ns;
}

// Returns "31 s" or "1.2 ms".
std::string Span(int64_t ns) {
  if (ns >= 10'000'000'000) return absl::StrCat(ns / 1'000'000'000, " s");
  if (ns >= 100'000'000) {
    return absl::StrCat(ns / 1'000'000'000, ".", ns / 100'000'000 % 10, " s");
  }
  if (ns >= 100'000) {
    return absl::StrCat(ns / 1'000'000, ".", ns / 100'000 % 10, " ms");
  }
  return absl::StrCat(ns / 1'000, " us");
}

// Returns "ranks 0, 1 are" or "rank 3 is".
std::string Ranks(const std::vector<int>& ranks, absl::string_view verb_of_one,
                  absl::string_view verb_of_many) {
  return absl::StrCat(RankList(ranks), " ",
                      ranks.size() == 1 ? verb_of_one : verb_of_many);
}

std::string PhaseText(const RankRecord& record) {
  if (record.phase == Phase::kUnknown) return "";
  if (record.unit.empty()) return std::string(PhaseName(record.phase));
  // A phase without a unit has its purpose in `unit` instead.
  const bool is_of_unit = record.phase != Phase::kCheckpoint;
  return absl::StrCat(PhaseName(record.phase), is_of_unit ? " of " : ": ",
                      record.unit);
}

std::string BehindText(int rank, const Standing& standing,
                       const SeenRank& seen) {
  std::string text =
      absl::StrCat("rank ", rank, " is behind by ", standing.missing,
                   standing.missing == 1 ? " call" : " calls", ": it ",
                   PositionOf(*seen.record));
  if (!seen.process.empty()) absl::StrAppend(&text, "; ", seen.process);
  return text;
}

struct Others {
  // By Standing::Where; of those that are behind, the furthest first.
  std::array<std::vector<int>, Standing::kPast + 1> ranks;
  std::vector<Standing> standings;  // by rank
};

// `left_out` is a rank, or -1 for none.
Others Classify(int left_out, const GroupCall& call,
                absl::Span<const SeenRank> ranks) {
  Others others;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    others.standings.push_back(StandingOf(ranks[rank], call));
    if (rank == left_out) continue;
    others.ranks[others.standings.back().where].push_back(rank);
  }
  std::vector<int>& behind = others.ranks[Standing::kBehind];
  std::stable_sort(behind.begin(), behind.end(), [&](int a, int b) {
    return others.standings[a].missing > others.standings[b].missing;
  });
  return others;
}

std::string TextOf(const Others& others, absl::Span<const SeenRank> ranks) {
  const auto& [unknown, outside, behind, in, past] = others.ranks;
  std::vector<std::string> parts;
  if (!in.empty()) {
    parts.push_back(absl::StrCat(Ranks(in, "is", "are"), " in it"));
  }
  if (!past.empty()) {
    parts.push_back(Ranks(past, "has finished it", "have finished it"));
  }
  for (size_t i = 0; i < behind.size() && i < kMostBehind; ++i) {
    const int rank = behind[i];
    parts.push_back(BehindText(rank, others.standings[rank], ranks[rank]));
  }
  if (behind.size() > kMostBehind) {
    parts.push_back(absl::StrCat(behind.size() - kMostBehind,
                                 " more ranks are behind by less"));
  }
  for (const int rank : unknown) {
    if (ranks[rank].process.empty()) continue;
    parts.push_back(absl::StrCat("of rank ", rank, ": ", ranks[rank].process));
  }
  if (!unknown.empty()) {
    parts.push_back(absl::StrCat("nothing is known of ", RankList(unknown)));
  }
  return parts.empty() ? "no other rank is known to be part of it"
                       : absl::StrJoin(parts, "; ");
}

// Returns the first operation that is being started or waited for, or null.
const OperationRecord* FirstOpen(const RankRecord& record) {
  const auto open =
      std::find_if(record.operations.begin(), record.operations.end(),
                   [](const auto& o) { return o.is_open(); });
  return open == record.operations.end() ? nullptr : &*open;
}

std::string StateText(const OperationRecord& operation, int64_t now_ns) {
  const std::string ago =
      absl::StrCat(Span(Since(operation.ended_ns, now_ns)), " ago");
  const int64_t took = Since(operation.started_ns, operation.ended_ns);
  switch (operation.state) {
    case OperationState::kStarting:
      return absl::StrCat("being started for ",
                          Span(Since(operation.started_ns, now_ns)));
    case OperationState::kStarted:
      return absl::StrCat("started ", Span(Since(operation.started_ns, now_ns)),
                          " ago");
    case OperationState::kWaiting:
      return absl::StrCat("waiting for ",
                          Span(Since(operation.waited_ns, now_ns)));
    case OperationState::kOnDevice:
      return absl::StrCat("left to the device ", ago);
    case OperationState::kDone:
      return absl::StrCat("done in ", Span(took), ", ", ago);
    case OperationState::kFailed:
      return absl::StrCat("FAILED after ", Span(took), ", ", ago);
    case OperationState::kDropped:
      return absl::StrCat("not waited for, dropped ", ago);
  }
  return "";
}

}  // namespace

std::optional<GroupCall> CallOfGroup(const RankRecord& record,
                                     const OperationRecord& operation) {
  if (operation.group < 0 ||
      operation.group >= static_cast<int>(record.groups.size())) {
    return std::nullopt;
  }
  return GroupCall{record.groups[operation.group].id, operation.call};
}

std::string NameOf(const OperationRecord& operation) {
  std::string text = absl::StrCat(KindName(operation.kind), " #");
  if (operation.number >= 0) {
    absl::StrAppend(&text, operation.number);
  } else {
    absl::StrAppend(&text, operation.call);
  }
  if (!operation.label.empty()) {
    absl::StrAppend(&text, " of ", operation.label);
  }
  return text;
}

std::string PositionOf(const RankRecord& record) {
  const std::string phase = PhaseText(record);
  const std::string in_phase =
      phase.empty() ? "" : absl::StrCat(" (", phase, ")");
  if (record.wait != StoreWait::kNothing) {
    return absl::StrCat(StoreWaitText(record.wait, record.wait_what), " for ",
                        Span(Since(record.wait_ns, record.taken_ns)), in_phase);
  }
  if (const OperationRecord* open = FirstOpen(record)) {
    return absl::StrCat("is in ", NameOf(*open), " for ",
                        Span(Since(open->open_since_ns(), record.taken_ns)),
                        in_phase);
  }
  if (record.operations.empty()) {
    return absl::StrCat("has called nothing yet", in_phase);
  }
  const OperationRecord& last = record.operations.back();
  const int64_t since = std::max(last.started_ns, last.ended_ns);
  if (last.state == OperationState::kFailed) {
    return absl::StrCat("has failed in ", NameOf(last), " ",
                        Span(Since(since, record.taken_ns)), " ago", in_phase);
  }
  return absl::StrCat("has called nothing since ", NameOf(last), ", ",
                      Span(Since(since, record.taken_ns)), " ago", in_phase);
}

std::string StandingOfOthers(int rank, const GroupCall& call,
                             absl::Span<const SeenRank> ranks) {
  return TextOf(Classify(rank, call, ranks), ranks);
}

std::string WaitText(int rank, const OperationRecord& operation,
                     absl::Span<const SeenRank> ranks) {
  const RankRecord& own = *ranks[rank].record;
  std::string text =
      absl::StrCat("rank ", rank, " has waited ",
                   Span(Since(operation.open_since_ns(), own.taken_ns)),
                   " for ", NameOf(operation));
  if (const auto call = CallOfGroup(own, operation)) {
    absl::StrAppend(&text, "; ", StandingOfOthers(rank, *call, ranks));
  }
  return text;
}

std::string RecordText(int rank, const SeenRank& seen, int max_operations) {
  std::string text = absl::StrCat("rank ", rank);
  if (!seen.process.empty()) absl::StrAppend(&text, " (", seen.process, ")");
  if (!seen.record) return absl::StrCat(text, " is not known\n");
  const RankRecord& record = *seen.record;
  absl::StrAppend(&text, " ", PositionOf(record), ", after ",
                  record.num_operations, " operations");
  if (record.phase != Phase::kUnknown) {
    absl::StrAppend(&text, "; ", PhaseText(record), " since ",
                    Span(Since(record.phase_ns, record.taken_ns)));
  }
  absl::StrAppend(&text, "\n");
  const auto count = static_cast<int>(record.operations.size());
  for (int i = std::max(0, count - max_operations); i < count; ++i) {
    const OperationRecord& operation = record.operations[i];
    absl::StrAppend(&text, "  ", NameOf(operation), DtypeText(operation.dtype),
                    ", ", operation.bytes,
                    " bytes: ", StateText(operation, record.taken_ns), "\n");
  }
  return text;
}

std::string JoinedText(const std::optional<GroupCall>& call,
                       absl::Span<const SeenRank> ranks, int max_ranks,
                       int max_operations) {
  std::vector<int> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::string text;
  if (call) {
    const Others others = Classify(-1, *call, ranks);
    absl::StrAppend(&text, TextOf(others, ranks), "\n");
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return others.standings[a].missing > others.standings[b].missing;
    });
  }
  const int shown = std::min(max_ranks, static_cast<int>(ranks.size()));
  for (int i = 0; i < shown; ++i) {
    absl::StrAppend(&text,
                    RecordText(order[i], ranks[order[i]], max_operations));
  }
  if (shown < static_cast<int>(ranks.size())) {
    absl::StrAppend(&text, "and ", ranks.size() - shown, " more ranks\n");
  }
  return text;
}

bool WriteWhole(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

absl::Status AppendForRank(const std::string& folder, int rank,
                           absl::string_view text) {
  const std::string path = absl::StrCat(folder, "/rank-", rank, ".txt");
  mkdir(folder.c_str(), 0755);  // what is there already stays
  const UniqueFd file(
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (file.is_open() && WriteWhole(file.get(), text)) return absl::OkStatus();
  return absl::ErrnoToStatus(
      errno, absl::StrCat("cannot write what the ranks do to ", path));
}

}  // namespace fsdp::comm
