// FNV-1a, a hash that is the same on every machine.
#ifndef BASE_FNV1A_H_
#define BASE_FNV1A_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace fsdp {

inline constexpr uint64_t kFnv1a = 0xcbf29ce484222325;  // of no bytes

// Returns the hash of a text that ends with `bytes`, if `hash` is the hash of
// what comes before them. It tells texts apart, but does not resist an
// adversary.
inline uint64_t Fnv1a(absl::string_view bytes, uint64_t hash = kFnv1a) {
  for (const char c : bytes) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace fsdp

#endif  // BASE_FNV1A_H_
