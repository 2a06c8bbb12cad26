// What a job's store has to do with one caller.
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

// The keys and values of a job's store.

namespace fsdp::comm {

// What c10d's stores do with their keys. Not thread-safe.
class StoreTable {
 public:
  // ResourceExhausted instead of more than `max_bytes` of keys and values.
  explicit StoreTable(size_t max_bytes = size_t{256} << 20)
      : max_bytes_(max_bytes) {}

  absl::Status Set(const std::string& key, std::string value);
  // Sets `value` where the key has `expected`, or where there is no such key
  // and `expected` is empty. What the key has then; `expected` where there is
  // none.
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            std::string value);
  // To a decimal number, 0 where there is none. InvalidArgument: the key has
  // something else, or the sum does not fit into 64 bits.
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend);
  bool Delete(const std::string& key);
  // All keys that begin with `prefix`; how many there were.
  int64_t DeleteAll(absl::string_view prefix);

  // Null: there is none. Valid until the table changes.
  const std::string* Find(const std::string& key) const;
  // The first of `keys` that is not there; null: all are.
  const std::string* FirstMissing(const std::vector<std::string>& keys) const;
  size_t size() const { return values_.size(); }

  // The keys that have come since the last call.
  std::vector<std::string> TakeNewKeys() {
    return std::exchange(new_keys_, {});
  }

 private:
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::vector<std::string> new_keys_;
};

// Bytes come in and go out; knows nothing of sockets and clocks. A caller that
// has not shown that it knows the secret makes it keep kClaimBytes; another one
// a message of each direction.
class StoreSession {
 public:
  // `nonce`: kNonceBytes that nobody could foresee. `table` outlives it.
  StoreSession(std::string secret, std::string nonce, StoreTable* table);

  // An error means to hang up. PermissionDenied: the caller does not know the
  // secret. InvalidArgument: it does not keep to the protocol.
  absl::Status Receive(absl::string_view bytes, absl::Time now);

  // Goes on with what has come already: when all output is sent, when
  // missing_key() has come, and at wait_deadline(). Errors: as Receive().
  absl::Status Advance(absl::Time now);

  // Whether the caller has shown that it knows the secret.
  bool accepted() const { return accepted_; }
  // Whether there is something to Receive() for before anything else.
  bool wants_input() const {
    return !accepted_ || (output_.empty() && !is_waiting());
  }

  // What is to be sent; whoever sends takes it off.
  std::string& output() { return output_; }
  bool has_output() const { return !output_.empty(); }

  // Whether the caller waits for keys.
  bool is_waiting() const { return wait_.has_value(); }
  // Of a wait: a key that is not there.
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
  absl::Status CheckClaim() const;
  absl::Status Answer(StoreMessage message, absl::Time now);
  // What `message` comes to; none: its wait goes on, in wait_.
  std::optional<StoreMessage> Act(StoreMessage message, absl::Time now);
  // Of wait_; none: it goes on.
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
