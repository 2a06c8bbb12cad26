// Lists, verifies and consolidates checkpoints:
//   ./bazelw run //tools/checkpoint -- --help
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>
#include <vector>

#include "base/files/file_system.h"
#include "tools/checkpoint/tool.h"

int main(int argc, char** argv) {
  // Relative paths are the user's, also under `bazel run`.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY")) {
    std::error_code error;
    std::filesystem::current_path(folder, error);
  }
  return fsdp::checkpoint::tool::RunTool(
      fsdp::RealFileSystem(), std::vector<std::string>(argv + 1, argv + argc),
      {std::cout, std::cerr, isatty(STDERR_FILENO) == 1});
}
