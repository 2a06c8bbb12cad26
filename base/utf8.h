// Reads and writes UTF-8.
#ifndef BASE_UTF8_H_
#define BASE_UTF8_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp {

// Returns the length in bytes of the UTF-8 sequence that `text` begins with; 0
// if there is none.
size_t Utf8Length(absl::string_view text);

// Appends the character `code`, which is below 0x110000 and no half of a
// surrogate pair.
void AppendUtf8(unsigned code, std::string& out);

// Returns whether `text` is UTF-8, so that a JSON string can hold it unchanged.
bool IsUtf8(absl::string_view text);

}  // namespace fsdp

#endif  // BASE_UTF8_H_
