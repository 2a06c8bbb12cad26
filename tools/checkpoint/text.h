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

// Returns "4.90 MB"; below 1,000 bytes "123 B".
std::string SizeText(int64_t bytes);
// Returns "1,234,567".
std::string Thousands(int64_t number);
// Returns "1 file" or "2 files".
std::string Count(int64_t number, absl::string_view noun);
// Returns a name, which comes from a file, without what a terminal would obey.
std::string Printable(absl::string_view name);

// Returns cells in columns, each line after `indent` spaces. `alignment` has
// 'l' or 'r' for each column; rows may have fewer cells.
std::string Columns(const std::vector<std::vector<std::string>>& rows,
                    absl::string_view alignment, int indent = 2);

// The progress of a long command, for people who watch.

// Called now and then with the bytes that are done, and all. May be null.
using OnBytes = std::function<void(int64_t done, int64_t total)>;

// Shows one line that is overwritten: "verify: 1.20 GB of 4.80 GB, 1.83 GB/s,
// 2 s left". One thread uses it.
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

// The arguments of a program that has several commands.

struct FlagSpec {
  std::string name;   // "keep_last"
  std::string value;  // what it takes, for --help: "N"; "" for a switch
  std::string help;
};

struct CommandSpec {
  std::string name;                    // "show"
  std::vector<std::string> arguments;  // "PATH"; "[NAME]" may be left out
  std::string summary;                 // one line
  std::string help;                    // more text
  std::vector<FlagSpec> flags;
};

// The arguments of a command. Thread-compatible.
class Arguments {
 public:
  // `words` follow the command's name: arguments and, in any order, flags as
  // --name=value, for switches --name; after "--" all are arguments.
  // InvalidArgument says what the command takes.
  static absl::StatusOr<Arguments> Parse(const CommandSpec& command,
                                         absl::Span<const std::string> words);

  // Returns "" for an argument that was left out.
  std::string operator[](size_t argument) const;
  bool Has(absl::string_view flag) const;
  // Returns "" if the flag is not given.
  std::string Text(absl::string_view flag) const;
  // InvalidArgument: the value is no number, or less than `min`.
  absl::StatusOr<int64_t> Number(absl::string_view flag, int64_t otherwise,
                                 int64_t min) const;

 private:
  std::vector<std::string> arguments_;
  std::map<std::string, std::string, std::less<>> flags_;
};

// Returns "checkpoint show [FLAGS] PATH [NAME]", what it does, and all its
// flags.
std::string HelpOf(absl::string_view program, const CommandSpec& command);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TEXT_H_
