#include "base/command_line.h"

#include <unistd.h>

#include <cstdlib>
#include <initializer_list>
#include <iostream>

#include "absl/algorithm/container.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"

namespace fsdp {
namespace {

// Abseil exits with 1 behind its help.
void EndHelp() {
  std::cout.flush();
  _exit(EXIT_SUCCESS);
}

bool AsksForHelp(absl::string_view word) {
  if (!absl::ConsumePrefix(&word, "-")) return false;
  absl::ConsumePrefix(&word, "-");
  return absl::c_linear_search(
      std::initializer_list<absl::string_view>{"help", "helpfull", "helpmatch",
                                               "helpon", "helppackage",
                                               "helpshort"},
      word.substr(0, word.find('=')));
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
  std::vector<char*> flags, help = {argv[0]};
  bool may_ask = true;
  for (char* word : absl::MakeConstSpan(argv, argc)) {
    may_ask = may_ask && word != absl::string_view("--");
    (may_ask && AsksForHelp(word) ? help : flags).push_back(word);
  }
  // First, so that help does not hide what is wrong with them.
  std::vector<char*> words =
      absl::ParseCommandLine(static_cast<int>(flags.size()), flags.data());
  if (help.size() == 1) return words;
  std::atexit(EndHelp);
  return absl::ParseCommandLine(static_cast<int>(help.size()), help.data());
}

absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        absl::string_view file) {
  const std::vector<char*> words = ParseCommandLine(argc, argv, usage, file);
  if (words.size() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("what is ", words[1], "? Flags begin with --"));
}

}  // namespace fsdp
