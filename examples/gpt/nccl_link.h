// What only a program built with --config=cuda has: one of two sources is
// linked.
#ifndef EXAMPLES_GPT_NCCL_LINK_H_
#define EXAMPLES_GPT_NCCL_LINK_H_

#include <c10/core/Device.h>

#include "absl/status/statusor.h"
#include "comm/bootstrap.h"

namespace gpt {

// NCCL between ranks of which this one has GPU `device`. FailedPrecondition: it
// is not linked.
absl::StatusOr<fsdp::comm::ConnectDevice> NcclOn(c10::Device device);

}  // namespace gpt

#endif  // EXAMPLES_GPT_NCCL_LINK_H_
