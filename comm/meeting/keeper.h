// A job's store that outlives the job's ranks.
#ifndef COMM_MEETING_KEEPER_H_
#define COMM_MEETING_KEEPER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_fd.h"

namespace fsdp::comm {

// Serves the store as long as the object lives. For a process that does nothing
// else: it may have as many descriptors from now on as the system allows, for
// every rank has several connections. `listener` listens already. Errors: as
// of StoreServer::Start().
absl::StatusOr<std::unique_ptr<StoreServer>> StartKeeper(UniqueFd listener,
                                                         std::string secret);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_KEEPER_H_
