// Runs train and asks its launcher what its ranks do when it has none any more.
// The ranks tell whether it was ready for that before it started them.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "comm/communicator.h"
#include "testing/gpt/train_program.h"

namespace gpt::testing {
namespace {

// Returns what the system says.
bool LauncherIgnores(int signal) {
  std::ifstream status(absl::StrCat("/proc/", getppid(), "/status"));
  std::string name;
  std::string mask;
  while (status >> name) {
    if (name != "SigIgn:") continue;
    status >> mask;
    return (std::stoull(mask, nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

int Main(int argc, char** argv) {
  TrainHooks hooks;
  hooks.connected = [](std::unique_ptr<fsdp::comm::Communicator> ranks) {
    if (LauncherIgnores(SIGQUIT) && LauncherIgnores(SIGUSR1)) {
      std::cout << "the launcher is ready for questions" << std::endl;
    }
    return ranks;
  };
  const int code = TrainProgram(argc, argv, /*nccl_on=*/nullptr, hooks);
  const bool is_rank = std::getenv("RANK") != nullptr;
  if (is_rank) return code;
  raise(SIGQUIT);
  raise(SIGUSR1);
  std::cout << "the launcher has survived" << std::endl;
  return code;
}

}  // namespace
}  // namespace gpt::testing

int main(int argc, char** argv) { return gpt::testing::Main(argc, argv); }
