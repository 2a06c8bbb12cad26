#include "base/testing/this_program.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::testing {
namespace {

constexpr int kLongestSilenceMs = 120'000;

}  // namespace

ChildProcess::ChildProcess(absl::string_view command, absl::string_view before,
                           absl::string_view after)
    : pipe_(popen(
          absl::StrCat("echo $$; ", before, "exec ", command, " 2>&1", after)
              .c_str(),
          "re")) {
  FSDP_CHECK(pipe_ != nullptr);
  setvbuf(pipe_, nullptr, _IONBF, 0);  // poll() knows of all that is unread
  FSDP_CHECK(ReadLine());
  FSDP_CHECK(absl::SimpleAtoi(output_, &pid_));
  output_.clear();
}

ChildProcess::~ChildProcess() {
  if (pipe_ == nullptr) return;
  Signal(SIGKILL);
  Wait();
}

bool ChildProcess::ReadUntil(absl::string_view text) {
  while (!absl::StrContains(output_, text)) {
    if (!ReadLine()) return false;
  }
  return true;
}

std::string ChildProcess::Await(absl::string_view text) {
  while (true) {
    const size_t begin = output_.size();
    if (!ReadLine()) return "";
    std::string line = output_.substr(begin);
    if (absl::StrContains(line, text)) return line;
  }
}

bool ChildProcess::AwaitLines(absl::string_view text, int count) {
  while (count > 0 && !Await(text).empty()) --count;
  return count == 0;
}

void ChildProcess::Signal(int signal) { kill(pid_, signal); }

int ChildProcess::Wait() {
  while (ReadLine()) {
  }
  const int status = pclose(std::exchange(pipe_, nullptr));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

int ChildProcess::WaitUnread() const {
  siginfo_t end = {};
  for (int ms = 0; ms < kLongestSilenceMs && end.si_pid == 0; ++ms) {
    waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOWAIT | WNOHANG);
    poll(nullptr, 0, 1);
  }
  return end.si_pid == 0 ? -1 : end.si_status;
}

bool ChildProcess::ReadLine() {
  pollfd readable = {fileno(pipe_), POLLIN, 0};
  if (pid_ > 0 && poll(&readable, 1, kLongestSilenceMs) == 0) {
    output_ += "[killed, as it was silent for too long]\n";
    Signal(SIGKILL);
  }
  char line[4096];
  if (fgets(line, sizeof(line), pipe_) == nullptr) return false;
  output_ += line;
  return true;
}

std::string ProgramPath() {
  char path[4096] = "";
  FSDP_CHECK(readlink("/proc/self/exe", path, sizeof(path) - 1) > 0);
  return path;
}

ProgramOutcome RunCommand(absl::string_view command) {
  FILE* const pipe = popen(absl::StrCat(command, " 2>&1").c_str(), "r");
  FSDP_CHECK(pipe != nullptr);
  ProgramOutcome outcome;
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    outcome.output.append(buffer, size);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  return outcome;
}

ProgramOutcome RunThisProgram(absl::string_view variables) {
  return RunCommand(absl::StrCat(variables, " '", ProgramPath(), "'"));
}

}  // namespace fsdp::testing
