#include "comm/launcher/launched_replica.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/meeting/job_store.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

std::string GoneKey(int replica, int incarnation) {
  return absl::StrCat("replicas/gone/", replica, "/", incarnation);
}

absl::StatusOr<std::optional<LaunchedReplica>> LaunchedReplica::Read(
    GetEnvironmentVariable get) {
  // Only FSDP_ variables count, not those of whoever has started the launcher.
  FSDP_ASSIGN_OR_RETURN(
      Environment environment, ReadEnvironment([get](const char* name) {
        return absl::StartsWith(name, "FSDP_") ? get(name) : nullptr;
      }));
  if (environment.replicas == 0) return std::nullopt;
  return LaunchedReplica(std::move(environment));
}

std::string LaunchedReplica::name() const {
  return absl::StrCat("replica ", environment_.replica);
}

std::string LaunchedReplica::rank_prefix() const {
  return absl::StrCat(environment_.replica, ".");
}

absl::Status LaunchedReplica::TellEnd(int incarnation,
                                      absl::Time deadline) const {
  FSDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<StoreConnection> keeper,
      StoreConnection::Open(environment_.keeper_addr, environment_.keeper_port,
                            environment_.secret, {deadline}));
  return keeper
      ->Call({static_cast<uint8_t>(StoreAsk::kSet),
              0,
              {GoneKey(environment_.replica, incarnation), "1"}},
             deadline)
      .status();
}

}  // namespace fsdp::comm
