// Proofs that somebody knows a secret.
#ifndef BASE_HMAC_H_
#define BASE_HMAC_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp {

inline constexpr size_t kHmacBytes = 32;

// HMAC-SHA256 (RFC 2104) of `text`, kHmacBytes; keys may have any length.
std::string HmacSha256(absl::string_view key, absl::string_view text);

// Takes as long whatever the strings hold, so that nobody finds the right one
// byte by byte.
bool SameInConstantTime(absl::string_view a, absl::string_view b);

// That nobody can foresee; at most 256.
std::string RandomBytes(size_t count);

}  // namespace fsdp

#endif  // BASE_HMAC_H_
