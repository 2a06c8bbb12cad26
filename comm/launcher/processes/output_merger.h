// Merges what ranks print into one readable stream.
#ifndef COMM_LAUNCHER_PROCESSES_OUTPUT_MERGER_H_
#define COMM_LAUNCHER_PROCESSES_OUTPUT_MERGER_H_

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::comm {

enum class OutputStream { kStdout = 0, kStderr = 1 };

// "[3] ", or "[1.3] " with the prefix "1.".
std::string RankLabel(absl::string_view prefix, int rank);

// Turns the bytes of each source's streams, such as a rank's, into whole lines
// after its label, "[0] text", in the order in which they were completed. A
// line without an end is ended where its stream ends, and after kMaxLine bytes.
//
// Where a stream goes to a terminal, text after a '\r' is a progress line: it
// is shown at once, stays below the other lines, and is replaced by the next
// one. Elsewhere '\r' is a byte like any other.
//
// Not thread-safe.
class OutputMerger {
 public:
  static constexpr size_t kMaxLine = size_t{1} << 20;

  struct Chunk {
    OutputStream stream;
    absl::string_view bytes;
  };

  // `labels`: of the sources, "[0] ".
  OutputMerger(bool stdout_is_terminal, bool stderr_is_terminal,
               std::vector<std::string> labels)
      : labels_(std::move(labels)),
        is_terminal_{stdout_is_terminal, stderr_is_terminal} {}

  // `bytes` have come from a stream of a source, by the index of its label.
  void Append(int from, OutputStream stream, absl::string_view bytes);

  // A stream of that source has ended.
  void Close(int from, OutputStream stream);

  // A line of the launcher's own, to standard error, behind all that has come.
  // Ends progress lines.
  void Say(absl::string_view text);

  // What has to be written next, valid until the next change; the queue must
  // not be empty.
  bool empty() const { return queue_.empty(); }
  Chunk front() const;
  size_t queued_bytes() const { return queued_bytes_; }

  // `count` bytes of front() have been written.
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

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_PROCESSES_OUTPUT_MERGER_H_
