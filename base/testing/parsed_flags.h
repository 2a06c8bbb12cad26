// Gives tests what a program makes of its command line.
#ifndef BASE_TESTING_PARSED_FLAGS_H_
#define BASE_TESTING_PARSED_FLAGS_H_

#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace fsdp::testing {

// Returns read(argc, argv) for the words of `line`, which blanks separate.
// Flags are then what they were before.
template <typename Read>
auto ParsedBy(const Read& read, absl::string_view line) {
  const absl::FlagSaver restore;
  std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  std::vector<char*> argv;
  argv.reserve(words.size());
  for (std::string& word : words) argv.push_back(word.data());
  return read(static_cast<int>(argv.size()), argv.data());
}

}  // namespace fsdp::testing

#endif  // BASE_TESTING_PARSED_FLAGS_H_
