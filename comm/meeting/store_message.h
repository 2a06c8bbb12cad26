// The messages on a connection to a job's store.
#ifndef COMM_MEETING_STORE_MESSAGE_H_
#define COMM_MEETING_STORE_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/hmac.h"

namespace fsdp::comm {

// A rank's request. The comments give its texts and its number, then the text
// or number of the reply kDone.
enum class StoreAsk : uint8_t {
  kSet = 1,        // key, value
  kCompareAndSet,  // key, expected value, new value -> the value afterwards
  kGet,            // key, ms to wait for it -> its value
  kAdd,            // key, number to add -> the sum
  kCheck,          // keys -> 1 if all are there, else 0
  kWait,           // keys, ms to wait for all of them
  kDelete,         // key -> 1 if it was there, else 0
  kCount,          // -> the number of keys
  kDeleteAll,      // prefix of keys, not empty -> the number of deleted keys
};

enum class StoreReply : uint8_t {
  kDone = 100,
  kNotThere,  // a key has not come in time
  kRefused,   // a text says why
};

// The longest frame. One side cannot make the other keep more.
inline constexpr size_t kMaxFrameBytes = size_t{16} << 20;

struct StoreMessage {
  uint8_t code = 0;  // a StoreAsk or a StoreReply
  int64_t number = 0;
  std::vector<std::string> texts;
};

// Returns a frame: its length in four bytes, the code (1 byte), the number (8),
// how many texts there are (4), and each text after its length (4), all in the
// byte order of this machine. InvalidArgument: it is longer than
// kMaxFrameBytes.
absl::StatusOr<std::string> EncodeFrame(const StoreMessage& message);

// Cuts the bytes that have come into messages.
class FrameReader {
 public:
  void Append(absl::string_view bytes);

  // Returns the next message, or nullopt while it is not complete.
  // InvalidArgument: the bytes are no frames, and the reader cannot be used any
  // more. It keeps at most one frame and what was appended after it.
  absl::StatusOr<std::optional<StoreMessage>> Next();

 private:
  std::string buffer_;
  size_t begin_ = 0;
};

// Before any message, both ends of a connection show each other that they
// belong to the job. The secret itself is never sent, and nothing of an earlier
// connection helps an attacker.

// Both ends send this first. The last byte is the version of the protocol.
inline constexpr absl::string_view kStoreMagic = "FSDPjob1";
inline constexpr size_t kNonceBytes = 32;

// The listener greets with the magic and a nonce.
inline constexpr size_t kGreetingBytes = kStoreMagic.size() + kNonceBytes;
// The caller claims to belong to the job with the magic, a nonce and a proof.
inline constexpr size_t kClaimBytes =
    kStoreMagic.size() + kNonceBytes + kHmacBytes;
// The listener answers with a proof, or hangs up if the claim is wrong.
inline constexpr size_t kWelcomeBytes = kHmacBytes;

// The proofs of the two ends differ, so that it does not help to send back what
// was received.
std::string CallerProof(absl::string_view secret,
                        absl::string_view listener_nonce,
                        absl::string_view caller_nonce);
std::string ListenerProof(absl::string_view secret,
                          absl::string_view listener_nonce,
                          absl::string_view caller_nonce);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_MESSAGE_H_
