// What goes over a connection to a job's store once both ends trust each other.
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

// What a rank asks for; `number` and `texts` of the message, and of the reply
// where it is kDone.
enum class StoreAsk : uint8_t {
  kSet = 1,        // key, value
  kCompareAndSet,  // key, expected, new value; the value then
  kGet,            // key; waits `number` ms for it; its value
  kAdd,            // key; `number` to add; the sum
  kCheck,          // keys; 1 if all are there, or 0
  kWait,           // keys; waits `number` ms for all of them
  kDelete,         // key; 1 if it was there, or 0
  kCount,          // how many keys there are
  kDeleteAll,      // what keys begin with, not empty; how many there were
};

enum class StoreReply : uint8_t {
  kDone = 100,
  kNotThere,  // in time
  kRefused,   // a text says why
};

// The longest frame, and so what one side makes the other keep.
inline constexpr size_t kMaxFrameBytes = size_t{16} << 20;

struct StoreMessage {
  uint8_t code = 0;  // a StoreAsk or a StoreReply
  int64_t number = 0;
  std::vector<std::string> texts;
};

// As a frame: its length in four bytes, code, number, and the texts, each after
// its length; little-endian. InvalidArgument: longer than kMaxFrameBytes.
absl::StatusOr<std::string> EncodeFrame(const StoreMessage& message);

// Bytes as they come, cut into messages.
class FrameReader {
 public:
  void Append(absl::string_view bytes);

  // The next message; none while it is not complete. InvalidArgument: these are
  // no frames; of no more use then. Keeps at most one frame and what was
  // appended after it.
  absl::StatusOr<std::optional<StoreMessage>> Next();

  size_t buffered_bytes() const { return buffer_.size() - begin_; }

 private:
  std::string buffer_;
  size_t begin_ = 0;
};

// How the two ends of a connection to a job's store show each other that they
// belong to the job: who listens greets with a nonce, who calls answers with
// one of its own and a proof, and gets a proof back. The secret itself is never
// sent, and nothing of an earlier connection helps.

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

#endif  // COMM_MEETING_STORE_MESSAGE_H_
