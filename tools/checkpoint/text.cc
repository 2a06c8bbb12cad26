#include "tools/checkpoint/text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace fsdp::checkpoint::tool {

std::string SizeText(int64_t bytes) {
  constexpr absl::string_view kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return absl::StrCat(bytes, " B");
  double size = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  while (size >= 999.995 && unit + 1 < std::size(kUnits)) {
    size /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", size, kUnits[unit]);
}

std::string Thousands(int64_t number) {
  std::string text = absl::StrCat(number);
  const size_t first = number < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

std::string Count(int64_t number, absl::string_view noun) {
  return absl::StrCat(Thousands(number), " ", noun, number == 1 ? "" : "s");
}

std::string Printable(absl::string_view name) {
  // Quotes do no harm.
  return absl::StrReplaceAll(absl::Utf8SafeCHexEscape(name),
                             {{"\\\\", "\\\\"}, {"\\\"", "\""}, {"\\'", "'"}});
}

std::string Columns(const std::vector<std::vector<std::string>>& rows,
                    absl::string_view alignment, int indent) {
  std::vector<size_t> widths(alignment.size(), 0);
  for (const std::vector<std::string>& row : rows) {
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    std::string line(static_cast<size_t>(indent), ' ');
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&line, i > 0 ? "  " : "",
                      alignment[i] == 'r' ? space : "", row[i],
                      alignment[i] == 'r' ? "" : space);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

namespace {

constexpr absl::Duration kPause = absl::Milliseconds(200);

}  // namespace

Progress::~Progress() {
  if (width_ > 0) out_ << "\n" << std::flush;
}

void Progress::Update(int64_t done, int64_t total) {
  const absl::Time now = now_();
  if (began_ == absl::InfinitePast()) began_ = now;
  if (now - written_ < kPause && done < total) return;
  written_ = now;
  const double seconds = absl::ToDoubleSeconds(now - began_);
  std::string line =
      absl::StrCat(what_, ": ", SizeText(done), " of ", SizeText(total));
  if (seconds > 0 && done > 0) {
    const double rate = static_cast<double>(done) / seconds;
    absl::StrAppendFormat(&line, ", %.2f GB/s, %.0f s left", rate / 1e9,
                          static_cast<double>(total - done) / rate);
  }
  const size_t width = line.size();
  line.resize(std::max(width, width_), ' ');
  width_ = width;
  out_ << "\r" << line << std::flush;
}

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
