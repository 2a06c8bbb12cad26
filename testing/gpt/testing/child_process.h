// A program that a test runs and listens to.
#ifndef TESTING_GPT_TESTING_CHILD_PROCESS_H_
#define TESTING_GPT_TESTING_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gpt::testing {

// Thread-compatible. The destructor kills a program that still runs.
class ChildProcess {
 public:
  // Runs argv[0], a path, with both output streams in one. Ends the test
  // program if that is not possible.
  explicit ChildProcess(std::vector<std::string> argv);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  // Reads until the output has `text`; returns false if it ends without it.
  bool ReadUntil(absl::string_view text);
  void Signal(int signal);
  // Waits for the end. Returns the exit code, or 128 + the signal.
  int Wait();

  // Returns what has been read so far, all of it after Wait().
  const std::string& output() const { return output_; }

 private:
  bool ReadSome();

  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::string output_;
};

}  // namespace gpt::testing

#endif  // TESTING_GPT_TESTING_CHILD_PROCESS_H_
