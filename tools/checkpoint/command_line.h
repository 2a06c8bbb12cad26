// Arguments of a program that has several commands.
#ifndef TOOLS_CHECKPOINT_COMMAND_LINE_H_
#define TOOLS_CHECKPOINT_COMMAND_LINE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint::tool {

struct FlagSpec {
  std::string name;   // "keep_last"
  std::string value;  // what it takes, for --help: "N"; "" for a switch
  std::string help;
};

struct CommandSpec {
  std::string name;                    // "show"
  std::vector<std::string> arguments;  // "PATH"; "[NAME]" may be left out
  std::string summary;                 // one line
  std::string help;                    // what there is to say besides
  std::vector<FlagSpec> flags;
};

// What was given to a command. Thread-compatible.
class Arguments {
 public:
  // `words` follow the command's name: arguments, and flags as --name=value or,
  // for switches, --name, in any order; behind "--" all are arguments.
  // InvalidArgument, saying what the command takes.
  static absl::StatusOr<Arguments> Parse(const CommandSpec& command,
                                         absl::Span<const std::string> words);

  // "" for one that was left out.
  std::string operator[](size_t argument) const;
  bool Has(absl::string_view flag) const;
  // "" without the flag.
  std::string Text(absl::string_view flag) const;
  // InvalidArgument for what is no number or less than `min`.
  absl::StatusOr<int64_t> Number(absl::string_view flag, int64_t otherwise,
                                 int64_t min) const;

 private:
  std::vector<std::string> arguments_;
  std::map<std::string, std::string, std::less<>> flags_;
};

// "checkpoint show [FLAGS] PATH [NAME]", what it does and all its flags.
std::string HelpOf(absl::string_view program, const CommandSpec& command);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_COMMAND_LINE_H_
