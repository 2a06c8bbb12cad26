// The options of one replica of a job of replicas.
#ifndef TESTING_GPT_FLAGS_REPLICA_OPTIONS_H_
#define TESTING_GPT_FLAGS_REPLICA_OPTIONS_H_

#include "absl/status/statusor.h"
#include "comm/startup/environment.h"
#include "testing/gpt/flags/options.h"

namespace gpt {

// Returns `options` as they are for this process. In a replica, by the
// environment, files and folders that each replica writes for itself get its
// number, and options.replicas is how many there are. Returns InvalidArgument
// if what was started is not what the flags ask for, or if they are for
// replicas only.
absl::StatusOr<TrainOptions> OptionsOfReplica(
    TrainOptions options, const fsdp::comm::Environment& environment);

}  // namespace gpt

#endif  // TESTING_GPT_FLAGS_REPLICA_OPTIONS_H_
