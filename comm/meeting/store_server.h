// Serves a job's store to those who know the job's secret.
#ifndef COMM_MEETING_STORE_SERVER_H_
#define COMM_MEETING_STORE_SERVER_H_

#include <poll.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/meeting/store_session.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {

// Where a store counts the callers that do not know the secret.
inline constexpr char kRefusalsKey[] = "/fsdp/refusals";

struct StoreServerOptions {
  // Whoever has not shown by then that it knows the secret is hung up on.
  absl::Duration claim_timeout = absl::Seconds(10);
  // Callers that have not shown it yet; of more, the one that came first is
  // hung up on.
  size_t max_strangers = 128;
};

// Answers on a thread of its own until it is destroyed. Strangers cost a
// connection each, for a short time, and reach nothing.
class StoreServer {
 public:
  // `listener` listens already. ResourceExhausted: no thread, no descriptors.
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
              const StoreServerOptions& options);

  void Serve();
  // The descriptors to wait for: wake_, listener_, then all callers.
  std::vector<pollfd> Watched() const;
  int PollTimeout() const;
  void Accept();
  // Who has not shown yet that it knows the secret.
  static bool IsStranger(const Caller& caller) {
    return !caller.session.accepted();
  }
  // Hangs up on the stranger that came first; false: there is none.
  bool DropStranger();
  // Whether to go on with a caller.
  // NOLINTNEXTLINE(google-runtime-int): as pollfd has it
  bool Handle(Caller& caller, short events);
  bool Read(Caller& caller);
  static bool Write(Caller& caller);
  // Callers whose wait is over.
  void ResumeWaits();
  bool IsLate(const Caller& caller, absl::Time now) const;

  const std::string secret_;
  const StoreServerOptions options_;
  UniqueFd listener_;
  const UniqueFd wake_;  // readable: the end
  StoreTable table_;
  std::list<Caller> callers_;  // as they came
  bool accepts_ = true;        // false: until somebody leaves
  std::thread thread_;
};

// A job's store that outlives the job's ranks.

// Serves the store as long as the object lives. For a process that does nothing
// else: it may have as many descriptors from now on as the system allows, for
// every rank has several connections. `listener` listens already. Errors: as
// of StoreServer::Start().
absl::StatusOr<std::unique_ptr<StoreServer>> StartKeeper(UniqueFd listener,
                                                         std::string secret);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_SERVER_H_
