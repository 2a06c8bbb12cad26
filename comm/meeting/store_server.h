// A job's store: its keys and values, the dialogue with one caller, and the
// server to those who know the job's secret.
#ifndef COMM_MEETING_STORE_SERVER_H_
#define COMM_MEETING_STORE_SERVER_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/bootstrap_socket.h"

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

 private:
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
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

// The key under which a store counts the callers that do not know the secret.
inline constexpr char kRefusalsKey[] = "/fsdp/refusals";

struct StoreServerOptions {
  // If a caller has not shown within this time that it knows the secret, the
  // server hangs up.
  absl::Duration claim_timeout = absl::Seconds(10);
  // While so many callers have not shown it yet (strangers), others wait until
  // the one that came first has had half of that time; the server then hangs up
  // on it.
  size_t max_strangers = 128;
};

// Answers on a thread of its own until it is destroyed. A stranger costs one
// connection for a short time and reaches nothing.
class StoreServer {
 public:
  // `listener` listens already. Raises the process's limit of descriptors as
  // far as the system allows, since every rank has several connections.
  // ResourceExhausted: no thread or descriptor is left.
  static absl::StatusOr<std::unique_ptr<StoreServer>> Start(
      UniqueFd listener, std::string secret,
      const StoreServerOptions& options = {});
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  ~StoreServer();

 private:
  struct Caller {
    UniqueFd fd;
    StoreSession session;
    absl::Time came;
  };

  StoreServer(UniqueFd listener, UniqueFd wake, std::string secret,
              const StoreServerOptions& options)
      : secret_(std::move(secret)),
        options_(options),
        listener_(std::move(listener)),
        wake_(std::move(wake)) {}

  void Serve();
  // Returns the descriptors to wait for: wake_, listener_, then all callers.
  std::vector<pollfd> Watched() const;
  int PollTimeout() const;
  void Accept();
  static bool IsStranger(const Caller& caller) {
    return !caller.session.accepted();
  }
  // Returns when the server may hang up on `stranger` to let another one in.
  absl::Time DropTime(const Caller& stranger) const {
    return stranger.came + options_.claim_timeout / 2;
  }
  // Hangs up on the stranger that came first. Returns false if there is none
  // that has had its time.
  bool DropStranger();
  // Serves a caller. Returns false if the server is to hang up.
  // NOLINTNEXTLINE(google-runtime-int): as pollfd has it
  bool Handle(Caller& caller, short events);
  bool Read(Caller& caller);
  static bool Write(Caller& caller);
  void ResumeWaits();

  const std::string secret_;
  const StoreServerOptions options_;
  UniqueFd listener_;
  const UniqueFd wake_;  // becomes readable when the server is to end
  StoreTable table_;
  std::list<Caller> callers_;  // as they came
  bool accepts_ = true;        // false: until something else happens
  std::thread thread_;
};

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_SERVER_H_
