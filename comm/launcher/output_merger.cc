#include "comm/launcher/output_merger.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

// Goes to the first column and clears what is right of it.
constexpr char kClearLine[] = "\r\x1b[K";

// Ranks wait with printing while more bytes than this are queued.
constexpr size_t kMaxQueuedBytes = size_t{4} << 20;

// A pipe that poll() calls writable takes this much without blocking (PIPE_BUF
// of Linux).
constexpr size_t kMaxWrite = 4096;

// Returns the text that a terminal would show last: what follows the last '\r'
// with anything behind it.
absl::string_view Shown(absl::string_view text) {
  while (absl::EndsWith(text, "\r")) text.remove_suffix(1);
  return text.substr(text.rfind('\r') + 1);
}

std::vector<std::string> LabelsOf(
    const std::vector<OutputPump::Process>& processes) {
  std::vector<std::string> labels;
  labels.reserve(processes.size());
  for (const auto& process : processes) labels.push_back(process.label);
  return labels;
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
  // Overwritten text is gone; a trailing '\r' still has to act.
  *partial =
      absl::StrCat("\r", shown, absl::EndsWith(*partial, "\r") ? "\r" : "");
  std::string line;
  if (!shown.empty()) line = absl::StrCat(LabelOf(source), shown);
  const bool is_shown = source == progress_source_ && line == progress_;
  // A rank may clear its own line, not that of another.
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

OutputPump::OutputPump(const std::vector<Process>& processes, int stdout_fd,
                       int stderr_fd)
    : stdout_fd_(stdout_fd),
      stderr_fd_(stderr_fd),
      merger_(isatty(stdout_fd), isatty(stderr_fd), LabelsOf(processes)) {
  for (size_t i = 0; i < processes.size(); ++i) {
    const int label = static_cast<int>(i);
    sources_.push_back({processes[i].stdout_fd, label, OutputStream::kStdout});
    sources_.push_back({processes[i].stderr_fd, label, OutputStream::kStderr});
  }
}

void OutputPump::Poll(int wake_fd, absl::Time deadline) {
  std::vector<pollfd> fds = {{wake_fd, POLLIN, 0}};
  const bool writes = !merger_.empty();
  if (writes) fds.push_back({SinkFd(), POLLOUT, 0});
  const size_t first_source = fds.size();
  const bool reads = merger_.queued_bytes() < kMaxQueuedBytes;
  for (const Source& source : sources_) {
    fds.push_back({reads ? source.fd : -1, POLLIN, 0});
  }
  if (poll(fds.data(), fds.size(), PollMilliseconds(deadline)) <= 0) return;
  if (writes && fds[1].revents != 0) Write();
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (fds[first_source + i].revents != 0) Read(&sources_[i]);
  }
}

void OutputPump::CloseSources() {
  for (Source& source : sources_) {
    while (source.fd >= 0 && Read(&source)) {
    }
    merger_.Close(source.label, source.stream);
  }
}

void OutputPump::Say(absl::string_view text) {
  if (!is_lost(OutputStream::kStderr)) merger_.Say(text);
}

int OutputPump::SinkFd() const {
  return merger_.front().stream == OutputStream::kStdout ? stdout_fd_
                                                         : stderr_fd_;
}

bool OutputPump::Read(Source* source) {
  char buffer[1 << 16];
  const ssize_t count = read(source->fd, buffer, sizeof(buffer));
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count > 0) {
    if (!is_lost(source->stream)) {
      merger_.Append(source->label, source->stream,
                     {buffer, static_cast<size_t>(count)});
    }
    return true;
  }
  merger_.Close(source->label, source->stream);
  source->fd = -1;
  return false;
}

void OutputPump::Write() {
  const absl::string_view bytes = merger_.front().bytes;
  const ssize_t count =
      write(SinkFd(), bytes.data(), std::min(bytes.size(), kMaxWrite));
  if (count >= 0) {
    merger_.Consume(static_cast<size_t>(count));
  } else if (errno != EAGAIN && errno != EINTR) {
    Lose(merger_.front().stream, errno);
  }
  while (!merger_.empty() && is_lost(merger_.front().stream)) {
    merger_.Consume(merger_.front().bytes.size());
  }
}

// Gives up a stream. It is no failure that nobody reads it any more, as under a
// closed terminal; a full disk is.
void OutputPump::Lose(OutputStream stream, int error) {
  is_lost_[static_cast<size_t>(stream)] = true;
  if (error == EPIPE || error == EIO) return;
  if (error_ == 0) error_ = error;
}

}  // namespace fsdp::comm
