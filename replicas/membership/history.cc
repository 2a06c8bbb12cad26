#include "replicas/membership/history.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

// nullopt: no line of a history.
std::optional<Span> ParseLine(absl::string_view line) {
  absl::string_view rest = line;
  if (!absl::ConsumePrefix(&rest, "from step ")) return std::nullopt;
  Span span;
  const size_t colon = rest.find(": replicas ");
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(rest.substr(0, colon), &span.from_step) ||
      span.from_step < 0) {
    return std::nullopt;
  }
  for (const absl::string_view word : absl::StrSplit(
           absl::StripPrefix(rest.substr(colon), ": replicas "), ' ')) {
    const std::optional<ReplicaId> id = ParseReplicaId(word);
    if (!id.has_value() || (!span.replicas.empty() &&
                            span.replicas.back().replica >= id->replica)) {
      return std::nullopt;
    }
    span.replicas.push_back(*id);
  }
  if (ToLine(span) != line) return std::nullopt;  // " 7", "007", "+7"
  return span;
}

}  // namespace

std::string ToLine(const Span& span) {
  std::string line = absl::StrCat("from step ", span.from_step, ": replicas");
  for (const ReplicaId& id : span.replicas) {
    absl::StrAppend(&line, " ", ToString(id));
  }
  return line;
}

Span ToSpan(const Roster& roster) {
  Span span;
  span.from_step = roster.step;
  span.replicas.reserve(roster.members.size());
  for (const Member& member : roster.members) {
    span.replicas.push_back(member.id);
  }
  return span;
}

absl::StatusOr<History> History::Parse(absl::string_view text) {
  if (text.size() > kMaxHistoryBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a history of ", text.size(),
                                                   " bytes is longer than ",
                                                   kMaxHistoryBytes));
  }
  History history;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::optional<Span> span = ParseLine(line);
    if (!span.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "line ", number, " of the history is \"",
          absl::CHexEscape(line.substr(0, 80)),
          "\", not like \"from step 7: replicas 0.1 2.1\" with rising "
          "replicas"));
    }
    history.Add(*span);
  }
  return history;
}

bool History::Add(const Span& span) {
  FSDP_CHECK(!span.replicas.empty());
  const bool reaches_beyond =
      !spans_.empty() && spans_.back().from_step > span.from_step;
  const absl::Span<const ReplicaId> before = ReplicasAt(span.from_step);
  if (!reaches_beyond && before == absl::MakeConstSpan(span.replicas)) {
    return false;
  }
  while (!spans_.empty() && spans_.back().from_step >= span.from_step) {
    spans_.pop_back();
  }
  if (spans_.empty() || spans_.back().replicas != span.replicas) {
    spans_.push_back(span);
  }
  return true;
}

absl::Span<const ReplicaId> History::ReplicasAt(int64_t step) const {
  for (auto span = spans_.rbegin(); span != spans_.rend(); ++span) {
    if (span->from_step <= step) return span->replicas;
  }
  return {};
}

std::string History::ToText() const {
  std::string text;
  for (const Span& span : spans_) absl::StrAppend(&text, ToLine(span), "\n");
  return text;
}

}  // namespace fsdp::replicas
