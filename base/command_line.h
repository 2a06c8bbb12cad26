// Reads the flags of a program, and their values.
#ifndef BASE_COMMAND_LINE_H_
#define BASE_COMMAND_LINE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// Sets the flags of ABSL_FLAG, and returns the other words, the program's name
// first. A flag that cannot be read exits with 1, also beside --help. --help
// prints `usage` and the flags of the source files whose paths end with `file`,
// and exits with 0, as do -help, --helpfull and Abseil's others.
// Later calls keep the first one's `usage`.
std::vector<char*> ParseCommandLine(int argc, char** argv,
                                    absl::string_view usage,
                                    absl::string_view file);

// Does that for a program whose words are flags alone. InvalidArgument: another
// word is there.
absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        absl::string_view file);

// Returns InvalidArgument: "--NAME=VALUE: WHY".
template <typename T, typename Value>
absl::Status InvalidFlag(const absl::Flag<T>& flag, const Value& value,
                         absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "--", absl::GetFlagReflectionHandle(flag).Name(), "=", value, ": ", why));
}

// Sets `value` to the number that a flag has. InvalidArgument: it is not from
// `least` to `most`.
template <typename T>
absl::Status ReadFlag(const absl::Flag<T>& flag, std::common_type_t<T> least,
                      std::common_type_t<T> most, T& value) {
  value = absl::GetFlag(flag);
  if (value >= least && value <= most) return absl::OkStatus();
  return InvalidFlag(flag, value,
                     absl::StrCat("expected ", least, " to ", most));
}

// Sets `value` to what the word that a flag has stands for. InvalidArgument:
// there is no such word.
template <typename T>
absl::Status ReadFlag(const absl::Flag<std::string>& flag,
                      const std::map<std::string, std::common_type_t<T>>& words,
                      T& value) {
  const std::string word = absl::GetFlag(flag);
  const auto found = words.find(word);
  if (found == words.end()) {
    const auto name = [](std::string* out, const auto& item) {
      out->append(item.first);
    };
    return InvalidFlag(
        flag, word,
        absl::StrCat("expected one of ", absl::StrJoin(words, ", ", name)));
  }
  value = found->second;
  return absl::OkStatus();
}

}  // namespace fsdp

#endif  // BASE_COMMAND_LINE_H_
