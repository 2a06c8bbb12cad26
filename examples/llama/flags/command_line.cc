#include "examples/llama/flags/command_line.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace llama {

absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        const std::string& file) {
  absl::SetProgramUsageMessage(usage);
  absl::FlagsUsageConfig config;
  config.contains_helpshort_flags = [file](absl::string_view path) {
    return absl::StrContains(path, file);
  };
  config.contains_help_flags = config.contains_helpshort_flags;
  absl::SetFlagsUsageConfig(config);
  // A flag of more than two values needs one; this one may stand alone.
  static char resume[] = "--resume=true";
  static char no_resume[] = "--resume=false";
  std::vector<char*> arguments(argv, argv + argc);
  for (char*& argument : arguments) {
    if (argument == absl::string_view("--resume")) argument = resume;
    if (argument == absl::string_view("--noresume")) argument = no_resume;
  }
  const std::vector<char*> rest =
      absl::ParseCommandLine(argc, arguments.data());
  if (rest.size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("what is ", rest[1], "? Flags begin with --"));
}

std::string ResolvePath(const std::string& path) {
  const char* const directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (path.empty() || directory == nullptr) return path;
  return std::filesystem::path(directory) / path;
}

}  // namespace llama
