#include "comm/meeting/keeper.h"

#include <sys/resource.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_fd.h"

namespace fsdp::comm {

absl::StatusOr<std::unique_ptr<StoreServer>> StartKeeper(UniqueFd listener,
                                                         std::string secret) {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    // With fewer it serves as many as it can.
    setrlimit(RLIMIT_NOFILE, &files);
  }
  return StoreServer::Start(std::move(listener), std::move(secret));
}

}  // namespace fsdp::comm
