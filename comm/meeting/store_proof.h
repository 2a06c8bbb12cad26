// How the two ends of a connection to a job's store show each other that they
// belong to the job: who listens greets with a nonce, who calls answers with
// one of its own and a proof, and gets a proof back. The secret itself is never
// sent, and nothing of an earlier connection helps.
#ifndef COMM_MEETING_STORE_PROOF_H_
#define COMM_MEETING_STORE_PROOF_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"
#include "base/hmac.h"

namespace fsdp::comm {

// What both ends send first; the last byte is the version of the protocol.
inline constexpr absl::string_view kStoreMagic = "FSDPjob1";
inline constexpr size_t kNonceBytes = 32;

// Of who listens: the magic, a nonce.
inline constexpr size_t kGreetingBytes = kStoreMagic.size() + kNonceBytes;
// Of who calls: the magic, a nonce, a proof.
inline constexpr size_t kClaimBytes =
    kStoreMagic.size() + kNonceBytes + kHmacBytes;
// Of who listens, where the claim is right: a proof. Otherwise it hangs up.
inline constexpr size_t kWelcomeBytes = kHmacBytes;

// The proofs differ, so that nobody gets in by sending back what was received.
std::string CallerProof(absl::string_view secret,
                        absl::string_view listener_nonce,
                        absl::string_view caller_nonce);
std::string ListenerProof(absl::string_view secret,
                          absl::string_view listener_nonce,
                          absl::string_view caller_nonce);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_PROOF_H_
