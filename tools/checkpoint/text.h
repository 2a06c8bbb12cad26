// How the tool prints names, sizes and tables.
#ifndef TOOLS_CHECKPOINT_TEXT_H_
#define TOOLS_CHECKPOINT_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint::tool {

// "4.90 MB"; "123 B" below 1,000.
std::string SizeText(int64_t bytes);
// "1,234,567".
std::string Thousands(int64_t number);
// "1 file", "2 files".
std::string Count(int64_t number, absl::string_view noun);
// Names come out of files: without what a terminal would obey.
std::string Printable(absl::string_view name);

// Lines of cells in columns, each line after `indent` spaces. `alignment` has
// 'l' or 'r' for each column; rows may have fewer cells.
std::string Columns(const std::vector<std::vector<std::string>>& rows,
                    absl::string_view alignment, int indent = 2);

// How far a long command is, for people who watch.

// Told now and then how many bytes of how many are done; may be null.
using OnBytes = std::function<void(int64_t done, int64_t total)>;

// One line that is written over: "verify: 1.20 GB of 4.80 GB, 1.83 GB/s, 2 s
// left". Used by one thread.
class Progress {
 public:
  Progress(std::ostream& out, std::string what, std::function<absl::Time()> now)
      : out_(out), what_(std::move(what)), now_(std::move(now)) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the line

  // Writes at most five times a second, and at the end.
  void Update(int64_t done, int64_t total);

 private:
  std::ostream& out_;
  const std::string what_;
  const std::function<absl::Time()> now_;
  absl::Time began_ = absl::InfinitePast();
  absl::Time written_ = absl::InfinitePast();
  size_t width_ = 0;  // of the line
};

// Arguments of a program that has several commands.

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

#endif  // TOOLS_CHECKPOINT_TEXT_H_
