#include "testing/gpt/flags/replica_options.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gpt {
namespace {

using ::fsdp::comm::Environment;
using ::fsdp::comm::StartedBy;

absl::Status CheckStarted(const TrainOptions& options,
                          const Environment& environment) {
  const bool is_started =
      environment.started_by != StartedBy::kNobody || environment.replicas > 0;
  if (options.replicas > 0 && is_started &&
      options.replicas != environment.replicas) {
    return absl::InvalidArgumentError(
        absl::StrCat("--replicas=", options.replicas,
                     ": this process was started as one of ",
                     environment.replicas, " replicas (FSDP_REPLICAS)"));
  }
  if (options.replicas > 0 || environment.replicas > 0 ||
      (options.replica_history.empty() && options.replica_replay.empty())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(options.replica_history.empty() ? "--replica-replay"
                                                   : "--replica-history",
                   " without --replicas: a run alone has no other replicas"));
}

}  // namespace

absl::StatusOr<TrainOptions> OptionsOfReplica(TrainOptions options,
                                              const Environment& environment) {
  FSDP_RETURN_IF_ERROR(CheckStarted(options, environment));
  if (environment.replicas == 0) return options;
  options.replicas = environment.replicas;
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  for (std::string* path :
       {&options.json, &options.trace, &options.save_init, &options.save}) {
    if (!path->empty()) absl::StrAppend(path, ".", environment.replica);
  }
  return options;
}

}  // namespace gpt
