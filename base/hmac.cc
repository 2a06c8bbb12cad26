#include "base/hmac.h"

#include <unistd.h>

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
  std::string bytes(count, '\0');
  FSDP_CHECK(getentropy(bytes.data(), count) == 0);
  return bytes;
}

}  // namespace fsdp
