#include "testing/gpt/testing/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/check.h"

namespace gpt::testing {

ChildProcess::ChildProcess(std::vector<std::string> argv) {
  int pipe_fds[2];
  FSDP_CHECK(pipe2(pipe_fds, O_CLOEXEC) == 0);
  output_fd_ = pipe_fds[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDERR_FILENO);
  std::vector<char*> pointers;
  pointers.reserve(argv.size() + 1);
  for (std::string& argument : argv) pointers.push_back(&argument[0]);
  pointers.push_back(nullptr);
  FSDP_CHECK(posix_spawn(&pid_, pointers[0], &actions, nullptr, pointers.data(),
                         environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_fds[1]);
}

ChildProcess::~ChildProcess() {
  if (pid_ >= 0) {
    Signal(SIGKILL);
    Wait();
  }
  close(output_fd_);
}

bool ChildProcess::ReadUntil(absl::string_view text) {
  while (!absl::StrContains(output_, text)) {
    if (!ReadSome()) return false;
  }
  return true;
}

void ChildProcess::Signal(int signal) { kill(pid_, signal); }

int ChildProcess::Wait() {
  while (ReadSome()) {
  }
  int status = 0;
  FSDP_CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool ChildProcess::ReadSome() {
  char buffer[4096];
  ssize_t count = 0;
  do {
    count = read(output_fd_, buffer, sizeof(buffer));
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return false;
  output_.append(buffer, count);
  return true;
}

}  // namespace gpt::testing
