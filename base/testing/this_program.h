// Runs programs as a test's processes, and the test itself: a shell starts it
// again in a role that an environment variable names.
#ifndef BASE_TESTING_THIS_PROGRAM_H_
#define BASE_TESTING_THIS_PROGRAM_H_

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::testing {

struct ProgramOutcome {
  int code = -1;       // -1 if a signal has ended it
  std::string output;  // both streams
};

// A program that a test listens to while it runs, both streams in one. It is
// killed by the destructor, and where it says nothing for two minutes.
class ChildProcess {
 public:
  // A shell runs `before`, then becomes `command`, whose standard output is
  // redirected by `after`.
  explicit ChildProcess(absl::string_view command,
                        absl::string_view before = "",
                        absl::string_view after = "");
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  // Reads until the output has `text`; returns false if it ends without it.
  bool ReadUntil(absl::string_view text);
  // Returns the next line that has `text`, or "" if none comes.
  std::string Await(absl::string_view text);
  // Returns whether so many further lines have `text`.
  bool AwaitLines(absl::string_view text, int count);
  void Signal(int signal);
  // Waits for the end. Returns the exit code, or 1000 + the signal that killed
  // it: a program that handles one may exit with 128 + its number.
  int Wait();
  // Returns the exit code of one that ends though nobody reads what it says, or
  // -1 where it does not end for two minutes.
  int WaitUnread() const;

  // Returns what has been read so far, all of it after Wait().
  const std::string& output() const { return output_; }
  pid_t pid() const { return pid_; }

 private:
  bool ReadLine();

  FILE* pipe_;
  pid_t pid_ = -1;
  std::string output_;
};

// Returns the path of this process's program.
std::string ProgramPath();

// Waits for the end of `command`. Stops the program if no process can be
// started.
ProgramOutcome RunCommand(absl::string_view command);

// Runs this program without arguments. `variables` are as a shell takes them:
// "A=b C=d".
ProgramOutcome RunThisProgram(absl::string_view variables);

}  // namespace fsdp::testing

#endif  // BASE_TESTING_THIS_PROGRAM_H_
