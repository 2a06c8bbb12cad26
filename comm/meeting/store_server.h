// Serves a job's store to those who know the job's secret.
#ifndef COMM_MEETING_STORE_SERVER_H_
#define COMM_MEETING_STORE_SERVER_H_

#include <poll.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/meeting/store_session.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {

// The key under which a store counts the callers that do not know the secret.
inline constexpr char kRefusalsKey[] = "/fsdp/refusals";

struct StoreServerOptions {
  // If a caller has not shown within this time that it knows the secret, the
  // server hangs up.
  absl::Duration claim_timeout = absl::Seconds(10);
  // If more callers than this have not shown it yet (strangers), the server
  // hangs up on the one that came first.
  size_t max_strangers = 128;
};

// Answers on a thread of its own until it is destroyed. A stranger costs one
// connection for a short time and reaches nothing.
class StoreServer {
 public:
  // `listener` listens already. ResourceExhausted: no thread or descriptor is
  // left.
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
  // Hangs up on the stranger that came first. Returns false if there is none.
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
  bool accepts_ = true;        // false: until somebody leaves
  std::thread thread_;
};

// Serves a store that outlives the ranks of its job, as long as the object
// lives, in a process that does nothing else. Raises the process's limit of
// descriptors as far as the system allows, since every rank has several
// connections. `listener` listens already. Returns the errors of
// StoreServer::Start().
absl::StatusOr<std::unique_ptr<StoreServer>> StartKeeper(UniqueFd listener,
                                                         std::string secret);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_SERVER_H_
