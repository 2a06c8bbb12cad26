// Proofs that somebody knows a secret.
#ifndef BASE_HMAC_H_
#define BASE_HMAC_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp {

inline constexpr size_t kHmacBytes = 32;

// Returns the HMAC-SHA256 (RFC 2104) of `text`, kHmacBytes. Keys have any
// length.
std::string HmacSha256(absl::string_view key, absl::string_view text);

// Compares in a time that does not depend on the strings' content, so that
// nobody finds the right one byte by byte.
bool SameInConstantTime(absl::string_view a, absl::string_view b);

// Returns `count` bytes that nobody can foresee; at most 256.
std::string RandomBytes(size_t count);

}  // namespace fsdp

#endif  // BASE_HMAC_H_
