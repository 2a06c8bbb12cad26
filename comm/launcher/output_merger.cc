#include "comm/launcher/output_merger.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

// Ranks wait with printing while more bytes than this are queued.
constexpr size_t kMaxQueuedBytes = size_t{4} << 20;

// A pipe that poll() calls writable takes this much without blocking (PIPE_BUF
// of Linux).
constexpr size_t kMaxWrite = 4096;

}  // namespace

OutputPump::OutputPump(const std::vector<Process>& processes, int stdout_fd,
                       int stderr_fd)
    : sinks_{stdout_fd, stderr_fd} {
  for (const Process& process : processes) {
    sources_.push_back({process.stdout_fd, kStdout, process.label});
    sources_.push_back({process.stderr_fd, kStderr, process.label});
  }
}

void OutputPump::Poll(int wake_fd, absl::Time deadline) {
  std::vector<pollfd> fds = {{wake_fd, POLLIN, 0}};
  const bool writes = !queue_.empty();
  if (writes) fds.push_back({sinks_[queue_.front().first], POLLOUT, 0});
  const size_t first_source = fds.size();
  const bool reads = queued_bytes_ < kMaxQueuedBytes;
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
    if (!source.line.empty()) EndLine(&source);
  }
}

void OutputPump::Say(absl::string_view text) {
  Push(kStderr, absl::StrCat(text, "\n"));
}

bool OutputPump::Read(Source* source) {
  char buffer[1 << 16];
  const ssize_t count = read(source->fd, buffer, sizeof(buffer));
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count > 0) {
    Append(source, {buffer, static_cast<size_t>(count)});
    return true;
  }
  if (!source->line.empty()) EndLine(source);
  source->fd = -1;
  return false;
}

void OutputPump::Append(Source* source, absl::string_view bytes) {
  for (size_t end; (end = bytes.find('\n')) != absl::string_view::npos;
       bytes.remove_prefix(end + 1)) {
    absl::StrAppend(&source->line, bytes.substr(0, end));
    EndLine(source);
  }
  absl::StrAppend(&source->line, bytes);
  if (source->line.size() >= kMaxLine) EndLine(source);
}

void OutputPump::EndLine(Source* source) {
  Push(source->stream, absl::StrCat(source->label, source->line, "\n"));
  source->line.clear();
}

void OutputPump::Push(Stream stream, std::string bytes) {
  if (is_lost_[stream]) return;
  queued_bytes_ += bytes.size();
  queue_.emplace_back(stream, std::move(bytes));
}

void OutputPump::Write() {
  auto& [stream, bytes] = queue_.front();
  const ssize_t count =
      write(sinks_[stream], bytes.data(), std::min(bytes.size(), kMaxWrite));
  if (count < 0) {
    if (errno != EAGAIN && errno != EINTR) Lose(stream, errno);
    return;
  }
  queued_bytes_ -= static_cast<size_t>(count);
  bytes.erase(0, static_cast<size_t>(count));
  if (bytes.empty()) queue_.pop_front();
}

// Gives up a stream. It is no failure that nobody reads it any more, as under a
// closed terminal; a full disk is.
void OutputPump::Lose(Stream stream, int error) {
  is_lost_[stream] = true;
  const auto kept = std::stable_partition(
      queue_.begin(), queue_.end(),
      [stream](const auto& entry) { return entry.first != stream; });
  for (auto lost = kept; lost != queue_.end(); ++lost) {
    queued_bytes_ -= lost->second.size();
  }
  queue_.erase(kept, queue_.end());
  if (error == EPIPE || error == EIO) return;
  if (error_ == 0) error_ = error;
}

}  // namespace fsdp::comm
