#include "base/hmac.h"

#include <sys/random.h>

#include <cerrno>

#include "base/check.h"
#include "mbedtls/md.h"

// This header does not declare its functions as C.
extern "C" {
#include "mbedtls/constant_time.h"
}

namespace fsdp {
namespace {

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string HmacSha256(absl::string_view key, absl::string_view text) {
  std::string result(kHmacBytes, '\0');
  const int error =
      mbedtls_md_hmac(mbedtls_md_info_from_type(MBEDTLS_MD_SHA256), Bytes(key),
                      key.size(), Bytes(text), text.size(),
                      reinterpret_cast<unsigned char*>(result.data()));
  FSDP_CHECK(error == 0);
  return result;
}

bool SameInConstantTime(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() &&
         mbedtls_ct_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string RandomBytes(size_t count) {
  // getrandom() delivers up to 256 bytes in one piece.
  FSDP_CHECK(count <= 256);
  std::string bytes(count, '\0');
  ssize_t got = -1;
  do {
    got = getrandom(bytes.data(), count, /*flags=*/0);
  } while (got < 0 && errno == EINTR);
  FSDP_CHECK(got == static_cast<ssize_t>(count));
  return bytes;
}

}  // namespace fsdp
