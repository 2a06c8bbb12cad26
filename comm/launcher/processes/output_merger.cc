#include "comm/launcher/processes/output_merger.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"

namespace fsdp::comm {
namespace {

// To the first column, and nothing right of it.
constexpr char kClearLine[] = "\r\x1b[K";

// The text that a terminal would show last: what follows the last '\r' with
// anything behind it.
absl::string_view Shown(absl::string_view text) {
  while (absl::EndsWith(text, "\r")) text.remove_suffix(1);
  return text.substr(text.rfind('\r') + 1);
}

}  // namespace

std::string RankLabel(absl::string_view prefix, int rank) {
  return absl::StrCat("[", prefix, rank, "] ");
}

void OutputMerger::Push(OutputStream stream, std::string bytes) {
  queued_bytes_ += bytes.size();
  queue_.emplace_back(stream, std::move(bytes));
}

void OutputMerger::PushLine(const Source& source, absl::string_view text) {
  const OutputStream stream = source.second;
  if (!is_terminal(stream)) {
    Push(stream, absl::StrCat(LabelOf(source), text, "\n"));
    return;
  }
  const bool shows_progress = !progress_.empty();
  if (source == progress_source_) progress_.clear();
  Push(stream, absl::StrCat(shows_progress ? kClearLine : "", LabelOf(source),
                            Shown(text), "\n", progress_));
}

void OutputMerger::PushProgress(const Source& source, std::string* partial) {
  if (!absl::StrContains(*partial, '\r')) return;
  const std::string shown(Shown(*partial));
  // What was overwritten is gone; a trailing '\r' still has to act.
  *partial =
      absl::StrCat("\r", shown, absl::EndsWith(*partial, "\r") ? "\r" : "");
  std::string line;
  if (!shown.empty()) line = absl::StrCat(LabelOf(source), shown);
  const bool is_shown = source == progress_source_ && line == progress_;
  // One rank may clear its own line, not that of another.
  if (is_shown || (line.empty() && source != progress_source_)) return;
  progress_source_ = source;
  progress_ = std::move(line);
  Push(source.second, absl::StrCat(kClearLine, progress_));
}

void OutputMerger::Append(int from, OutputStream stream,
                          absl::string_view bytes) {
  const Source source(from, stream);
  std::string& partial = partial_[source];
  for (size_t end; (end = bytes.find('\n')) != absl::string_view::npos;
       bytes.remove_prefix(end + 1)) {
    absl::StrAppend(&partial, bytes.substr(0, end));
    PushLine(source, partial);
    partial.clear();
  }
  absl::StrAppend(&partial, bytes);
  if (is_terminal(stream)) PushProgress(source, &partial);
  if (partial.size() >= kMaxLine) {
    PushLine(source, partial);
    partial.clear();
  }
}

void OutputMerger::Close(int from, OutputStream stream) {
  const Source source(from, stream);
  const auto found = partial_.find(source);
  if (found == partial_.end()) return;
  if (!found->second.empty()) PushLine(source, found->second);
  partial_.erase(found);
}

void OutputMerger::Say(absl::string_view text) {
  const bool covers_progress =
      !progress_.empty() && is_terminal(OutputStream::kStderr);
  progress_.clear();
  Push(OutputStream::kStderr,
       absl::StrCat(covers_progress ? kClearLine : "", text, "\n"));
}

OutputMerger::Chunk OutputMerger::front() const {
  FSDP_CHECK(!queue_.empty());
  const auto& [stream, bytes] = queue_.front();
  return {stream, absl::string_view(bytes).substr(front_written_)};
}

void OutputMerger::Consume(size_t count) {
  FSDP_CHECK(count <= front().bytes.size());
  queued_bytes_ -= count;
  front_written_ += count;
  if (front_written_ < queue_.front().second.size()) return;
  queue_.pop_front();
  front_written_ = 0;
}

}  // namespace fsdp::comm
