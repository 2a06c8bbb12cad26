// Merges what ranks print into one readable stream.
#ifndef COMM_LAUNCHER_OUTPUT_MERGER_H_
#define COMM_LAUNCHER_OUTPUT_MERGER_H_

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace fsdp::comm {

enum class OutputStream { kStdout = 0, kStderr = 1 };

// Returns "[3] ", or "[1.3] " with the prefix "1.".
std::string RankLabel(absl::string_view prefix, int rank);

// Makes whole lines of the bytes of several sources, such as ranks: "[0] text",
// with the label of the source, in the order in which they were completed. The
// end of a stream also ends its line, and so do kMaxLine bytes.
//
// On a terminal, text after a '\r' is a progress line: it is shown at once,
// stays below the other lines, and is replaced by the next one. Elsewhere '\r'
// is a byte like any other.
//
// Not thread-safe.
class OutputMerger {
 public:
  static constexpr size_t kMaxLine = size_t{1} << 20;

  struct Chunk {
    OutputStream stream;
    absl::string_view bytes;
  };

  // `labels` has the label of each source, such as "[0] ".
  OutputMerger(bool stdout_is_terminal, bool stderr_is_terminal,
               std::vector<std::string> labels)
      : labels_(std::move(labels)),
        is_terminal_{stdout_is_terminal, stderr_is_terminal} {}

  // Takes bytes of a stream of source `from`, an index into the labels.
  void Append(int from, OutputStream stream, absl::string_view bytes);

  // Ends a stream of that source.
  void Close(int from, OutputStream stream);

  // Adds a line of the launcher's own, for standard error, behind all that has
  // come. Ends progress lines.
  void Say(absl::string_view text);

  bool empty() const { return queue_.empty(); }
  // Returns what has to be written next, valid until the next change. The queue
  // must not be empty.
  Chunk front() const;
  size_t queued_bytes() const { return queued_bytes_; }

  // Takes off `count` bytes of front(), which have been written.
  void Consume(size_t count);

 private:
  using Source = std::pair<int, OutputStream>;

  bool is_terminal(OutputStream stream) const {
    return is_terminal_[static_cast<size_t>(stream)];
  }
  const std::string& LabelOf(const Source& source) const {
    return labels_[static_cast<size_t>(source.first)];
  }
  void Push(OutputStream stream, std::string bytes);
  void PushLine(const Source& source, absl::string_view text);
  void PushProgress(const Source& source, std::string* partial);

  const std::vector<std::string> labels_;
  const std::array<bool, 2> is_terminal_;
  std::map<Source, std::string> partial_;  // lines that have not ended
  std::deque<std::pair<OutputStream, std::string>> queue_;
  size_t front_written_ = 0;  // bytes of the first entry
  size_t queued_bytes_ = 0;
  Source progress_source_ = {-1, OutputStream::kStdout};
  std::string progress_;  // as shown; empty: none
};

// Moves what ranks print from their pipes to the launcher's output. Only Poll()
// blocks, even if nobody reads that output. If one of its streams can no longer
// be written, the rest of it is dropped and the ranks go on.
class OutputPump {
 public:
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

  // Writes a line of the launcher's own behind what was read.
  void Say(absl::string_view text);

  // True if all that was read is written or dropped.
  bool is_empty() const { return merger_.empty(); }
  // Returns the error with which output was dropped; 0: none was, or its reader
  // has gone.
  int error() const { return error_; }

 private:
  struct Source {
    int fd;     // -1: at its end
    int label;  // the index of its label
    OutputStream stream;
  };

  int SinkFd() const;
  bool Read(Source* source);
  void Write();
  void Lose(OutputStream stream, int error);
  bool is_lost(OutputStream stream) const {
    return is_lost_[static_cast<size_t>(stream)];
  }

  std::vector<Source> sources_;
  const int stdout_fd_;
  const int stderr_fd_;
  OutputMerger merger_;
  std::array<bool, 2> is_lost_ = {};  // by OutputStream
  int error_ = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_OUTPUT_MERGER_H_
