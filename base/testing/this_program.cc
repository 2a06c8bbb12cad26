#include "base/testing/this_program.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::testing {

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
