#include "comm/launcher/processes/output_pump.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

// While more than this waits to be written, ranks have to wait with printing.
constexpr size_t kMaxQueuedBytes = size_t{4} << 20;

// A pipe that poll() calls writable takes this much without blocking (PIPE_BUF
// of Linux).
constexpr size_t kMaxWrite = 4096;

}  // namespace

OutputPump::OutputPump(std::vector<Source> sources,
                       std::vector<std::string> labels, int stdout_fd,
                       int stderr_fd)
    : sources_(std::move(sources)),
      stdout_fd_(stdout_fd),
      stderr_fd_(stderr_fd),
      merger_(isatty(stdout_fd), isatty(stderr_fd), std::move(labels)) {}

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

// Whether something was read.
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

// That nobody reads any more, as under a closed terminal, is no failure; a full
// disk is.
void OutputPump::Lose(OutputStream stream, int error) {
  is_lost_[static_cast<size_t>(stream)] = true;
  if (error == EPIPE || error == EIO) return;
  if (error_ == 0) error_ = error;
}

}  // namespace fsdp::comm
