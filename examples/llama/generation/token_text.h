// Tokens as people write and read them.
#ifndef EXAMPLES_LLAMA_GENERATION_TOKEN_TEXT_H_
#define EXAMPLES_LLAMA_GENERATION_TOKEN_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace llama {

// Of "1, 2 3": integers with commas or white space between. InvalidArgument:
// something else.
absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text);

// Tokens that are bytes.
std::vector<int64_t> BytesOf(absl::string_view text);

// The other way, byte by byte, for a terminal: characters of UTF-8 as soon as
// they are whole, and '?' for what could be taken for a command or is no text.
class PrintableText {
 public:
  // What can be shown now.
  std::string Add(int64_t token);
  // At the end.
  std::string Finish();

 private:
  std::string waiting_;  // the beginning of a character
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_TOKEN_TEXT_H_
