#include "comm/meeting/store_proof.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/hmac.h"

namespace fsdp::comm {

std::string CallerProof(absl::string_view secret,
                        absl::string_view listener_nonce,
                        absl::string_view caller_nonce) {
  return HmacSha256(secret, absl::StrCat(kStoreMagic, "caller", listener_nonce,
                                         caller_nonce));
}

std::string ListenerProof(absl::string_view secret,
                          absl::string_view listener_nonce,
                          absl::string_view caller_nonce) {
  return HmacSha256(secret, absl::StrCat(kStoreMagic, "listener",
                                         listener_nonce, caller_nonce));
}

}  // namespace fsdp::comm
