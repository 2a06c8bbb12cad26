// Merges what ranks print into one readable stream.
#ifndef COMM_LAUNCHER_OUTPUT_MERGER_H_
#define COMM_LAUNCHER_OUTPUT_MERGER_H_

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace fsdp::comm {

// Moves what ranks print from their pipes to the launcher's output, in whole
// lines, "[0] text", in the order in which they were completed. The end of a
// pipe also ends its line, and so do kMaxLine bytes. Only Poll() blocks, even
// if nobody reads that output. If one of its streams can no longer be written,
// the rest of it is dropped and the ranks go on. Not thread-safe.
class OutputPump {
 public:
  static constexpr size_t kMaxLine = size_t{1} << 20;

  // The pipes to which a process prints, which do not block and are not owned,
  // and the label of its lines.
  struct Process {
    int stdout_fd;
    int stderr_fd;
    std::string label;
  };

  OutputPump(const std::vector<Process>& processes, int stdout_fd,
             int stderr_fd);

  // Waits until `wake_fd` is readable, something can be read or written, or
  // `deadline` has passed. Moves what there is.
  void Poll(int wake_fd, absl::Time deadline);

  // Reads what is in the pipes and ends all streams.
  void CloseSources();

  // Writes a line of the launcher's own to standard error, behind what was
  // read.
  void Say(absl::string_view text);

  // True if all that was read is written or dropped.
  bool is_empty() const { return queue_.empty(); }
  // Returns the error with which output was dropped; 0: none was, or its reader
  // has gone.
  int error() const { return error_; }

 private:
  enum Stream { kStdout, kStderr };
  struct Source {
    int fd;  // -1: at its end
    Stream stream;
    std::string label;
    std::string line = {};  // has not ended
  };

  bool Read(Source* source);
  void Append(Source* source, absl::string_view bytes);
  void EndLine(Source* source);
  void Push(Stream stream, std::string bytes);
  void Write();
  void Lose(Stream stream, int error);

  std::vector<Source> sources_;
  const std::array<int, 2> sinks_;                    // by Stream
  std::deque<std::pair<Stream, std::string>> queue_;  // to be written
  size_t queued_bytes_ = 0;
  std::array<bool, 2> is_lost_ = {};  // by Stream
  int error_ = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_OUTPUT_MERGER_H_
