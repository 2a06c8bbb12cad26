// The keys and values of a job's store, and its dialogue with one caller.
#ifndef COMM_MEETING_STORE_SESSION_H_
#define COMM_MEETING_STORE_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/meeting/store_message.h"

namespace fsdp::comm {

// Keys and values, with the operations of c10d's stores. Not thread-safe.
class StoreTable {
 public:
  // A call that would need more than `max_bytes` of keys and values returns
  // ResourceExhausted.
  explicit StoreTable(size_t max_bytes = size_t{256} << 20)
      : max_bytes_(max_bytes) {}

  absl::Status Set(const std::string& key, std::string value);
  // Sets `value` if the key has `expected`, or if there is no such key and
  // `expected` is empty. Returns the value that the key has then, or `expected`
  // if there is no key.
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            std::string value);
  // Adds to the decimal number of a key, 0 if there is none, and returns the
  // sum. InvalidArgument: the key holds no number, or the sum does not fit into
  // 64 bits.
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend);
  bool Delete(const std::string& key);
  // Deletes all keys that begin with `prefix` and returns how many there were.
  int64_t DeleteAll(absl::string_view prefix);

  // Returns the value of a key, or null. Valid until the table changes.
  const std::string* Find(const std::string& key) const;
  // Returns the first of `keys` that is not there; null if all are.
  const std::string* FirstMissing(const std::vector<std::string>& keys) const;
  size_t size() const { return values_.size(); }

  // Returns the keys that have come since the last call.
  std::vector<std::string> TakeNewKeys() {
    return std::exchange(new_keys_, {});
  }

 private:
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::vector<std::string> new_keys_;
};

// Turns the bytes of one caller into replies, without sockets and clocks. It
// keeps kClaimBytes of a caller that has not shown that it knows the secret,
// and one message in each direction of another caller.
class StoreSession {
 public:
  // `nonce` has kNonceBytes that nobody could foresee. `table` outlives it.
  StoreSession(std::string secret, std::string nonce, StoreTable* table);

  // Takes bytes that have come. After an error, hang up. PermissionDenied: the
  // caller does not know the secret. InvalidArgument: it breaks the protocol.
  absl::Status Receive(absl::string_view bytes, absl::Time now);

  // Goes on with earlier bytes, with the errors of Receive(). Call it when all
  // output is sent, when missing_key() has come, and at wait_deadline().
  absl::Status Advance(absl::Time now);

  // True once the caller has shown that it knows the secret.
  bool accepted() const { return accepted_; }
  // True if it needs bytes before it can go on.
  bool wants_input() const {
    return !accepted_ || (output_.empty() && !is_waiting());
  }

  // The bytes to send. The sender takes them off.
  std::string& output() { return output_; }
  bool has_output() const { return !output_.empty(); }

  bool is_waiting() const { return wait_.has_value(); }
  // A key that a wait still needs, and the end of that wait.
  const std::string& missing_key() const { return wait_->missing; }
  absl::Time wait_deadline() const { return wait_->deadline; }

 private:
  struct Wait {
    StoreAsk ask;  // kWait or kGet
    std::vector<std::string> keys;
    std::string missing;
    absl::Time deadline;
  };

  // Takes what belongs to the claim off `bytes`.
  absl::Status ReceiveClaim(absl::string_view* bytes);
  absl::Status Answer(StoreMessage message, absl::Time now);
  // Returns the reply to `message`, or nullopt if it begins a wait, in wait_.
  std::optional<StoreMessage> Act(StoreMessage message, absl::Time now);
  // Returns the reply that ends wait_, or nullopt while that goes on.
  std::optional<StoreMessage> EndOfWait(absl::Time now);
  absl::Status Reply(const StoreMessage& reply);

  const std::string secret_;
  const std::string nonce_;
  StoreTable* const table_;
  std::string claim_;
  bool accepted_ = false;
  FrameReader frames_;
  std::optional<Wait> wait_;
  std::string output_;
};

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_SESSION_H_
