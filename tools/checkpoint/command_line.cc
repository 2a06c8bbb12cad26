#include "tools/checkpoint/command_line.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

bool MayBeLeftOut(const std::string& argument) {
  return absl::StartsWith(argument, "[");
}

std::string FlagText(const FlagSpec& flag) {
  return absl::StrCat("--", flag.name, flag.value.empty() ? "" : "=",
                      flag.value);
}

std::string FlagsOf(const CommandSpec& command) {
  return absl::StrJoin(command.flags, ", ",
                       [](std::string* out, const FlagSpec& flag) {
                         absl::StrAppend(out, FlagText(flag));
                       });
}

std::string Usage(const CommandSpec& command) {
  return absl::StrCat(command.name, " ", absl::StrJoin(command.arguments, " "));
}

// The flag's name and its value, "" without one.
absl::StatusOr<std::pair<std::string, std::string>> ParseFlag(
    const CommandSpec& command, const std::string& word) {
  const size_t equals = word.find('=');
  const bool has_value = equals != std::string::npos;
  const std::string name = word.substr(2, has_value ? equals - 2 : equals);
  const auto found =
      std::find_if(command.flags.begin(), command.flags.end(),
                   [&name](const FlagSpec& f) { return f.name == name; });
  if (found == command.flags.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", name, " is no flag of ", command.name, ", which has ",
        command.flags.empty() ? "none" : FlagsOf(command)));
  }
  if (has_value == found->value.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(word, ": write it ", FlagText(*found)));
  }
  return std::make_pair(name, has_value ? word.substr(equals + 1) : "");
}

}  // namespace

absl::StatusOr<Arguments> Arguments::Parse(
    const CommandSpec& command, absl::Span<const std::string> words) {
  Arguments result;
  bool flags_end = false;
  for (const std::string& word : words) {
    if (!flags_end && word == "--") {
      flags_end = true;
    } else if (!flags_end && absl::StartsWith(word, "--")) {
      auto flag = ParseFlag(command, word);
      if (!flag.ok()) return flag.status();
      if (!result.flags_.insert(*flag).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", flag->first, " is given twice"));
      }
    } else {
      result.arguments_.push_back(word);
    }
  }
  const size_t given = result.arguments_.size();
  const size_t needed = command.arguments.size() -
                        std::count_if(command.arguments.begin(),
                                      command.arguments.end(), MayBeLeftOut);
  if (given >= needed && given <= command.arguments.size()) return result;
  return absl::InvalidArgumentError(
      absl::StrCat(given < needed ? "something is missing: "
                                  : "there is more than it takes: ",
                   "the command is ", Usage(command)));
}

std::string Arguments::operator[](size_t argument) const {
  return argument < arguments_.size() ? arguments_[argument] : "";
}

bool Arguments::Has(absl::string_view flag) const {
  return flags_.find(flag) != flags_.end();
}

std::string Arguments::Text(absl::string_view flag) const {
  const auto found = flags_.find(flag);
  return found == flags_.end() ? "" : found->second;
}

absl::StatusOr<int64_t> Arguments::Number(absl::string_view flag,
                                          int64_t otherwise,
                                          int64_t min) const {
  if (!Has(flag)) return otherwise;
  int64_t number = 0;
  if (absl::SimpleAtoi(Text(flag), &number) && number >= min) return number;
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, "=", Text(flag), ": give a number of at least ", min));
}

std::string HelpOf(absl::string_view program, const CommandSpec& command) {
  std::string text =
      absl::StrCat(program, " ", Usage(command), "\n  ", command.summary, "\n");
  if (!command.help.empty()) absl::StrAppend(&text, command.help, "\n");
  std::vector<std::vector<std::string>> rows;
  rows.reserve(command.flags.size());
  for (const FlagSpec& flag : command.flags) {
    rows.push_back({FlagText(flag), flag.help});
  }
  return absl::StrCat(text, Columns(rows, "ll"));
}

}  // namespace fsdp::checkpoint::tool
