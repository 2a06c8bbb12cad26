// UTF-8: what is, and how characters are written in it.
#ifndef BASE_UTF8_H_
#define BASE_UTF8_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp {

// Bytes of the UTF-8 sequence that `text` begins with; 0 if there is none.
size_t Utf8Length(absl::string_view text);

// `code` is a character's: below 0x110000 and no half of a surrogate pair.
void AppendUtf8(unsigned code, std::string& out);

// Whether a string of JSON can say `text` as it is.
bool IsUtf8(absl::string_view text);

}  // namespace fsdp

#endif  // BASE_UTF8_H_
