// Moves what ranks print from their pipes to where the launcher prints.
#ifndef COMM_LAUNCHER_PROCESSES_OUTPUT_PUMP_H_
#define COMM_LAUNCHER_PROCESSES_OUTPUT_PUMP_H_

#include <array>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/launcher/processes/output_merger.h"

namespace fsdp::comm {

// Never blocks but in Poll(), whoever does not read. A stream that cannot be
// written any more is lost: the ranks go on without.
class OutputPump {
 public:
  // A pipe that does not block; not owned.
  struct Source {
    int fd;     // -1: at its end
    int label;  // the index of its label
    OutputStream stream;
  };

  // `labels`: as of OutputMerger.
  OutputPump(std::vector<Source> sources, std::vector<std::string> labels,
             int stdout_fd, int stderr_fd);

  // Waits until there is something to read or to write, `wake_fd` is readable,
  // or it is `deadline`; and moves what there is.
  void Poll(int wake_fd, absl::Time deadline);

  // Reads what is in the pipes by now; nothing more comes from them.
  void CloseSources();

  // Has a line of the launcher's own written behind what was read.
  void Say(absl::string_view text);

  // Whether all that was read is written, or lost.
  bool is_empty() const { return merger_.empty(); }
  // Why some was lost; 0: nothing was, or nobody reads any more.
  int error() const { return error_; }

 private:
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

#endif  // COMM_LAUNCHER_PROCESSES_OUTPUT_PUMP_H_
