#include "base/command_line.h"

#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/types/span.h"

namespace fsdp {
namespace {

bool asks_for_help = false;

// Abseil exits with 1 behind its help.
void EndHelp() {
  if (!asks_for_help) return;
  std::cout.flush();
  _exit(EXIT_SUCCESS);
}

}  // namespace

std::vector<char*> ParseCommandLine(int argc, char** argv,
                                    absl::string_view usage,
                                    absl::string_view file) {
  static const bool is_set = [usage] {
    absl::SetProgramUsageMessage(usage);  // which ends a program at the second
    return true;
  }();
  static_cast<void>(is_set);
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [file =
                                    std::string(file)](absl::string_view path) {
    return absl::EndsWith(path, file);
  };
  config.contains_helpshort_flags = config.contains_help_flags;
  absl::SetFlagsUsageConfig(config);
  asks_for_help = absl::c_linear_search(absl::MakeConstSpan(argv, argc),
                                        absl::string_view("--help"));
  if (asks_for_help) std::atexit(EndHelp);
  std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  asks_for_help = false;
  return words;
}

}  // namespace fsdp
