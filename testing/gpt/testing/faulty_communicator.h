// A communicator whose operations bring a rank its fault.
#ifndef TESTING_GPT_TESTING_FAULTY_COMMUNICATOR_H_
#define TESTING_GPT_TESTING_FAULTY_COMMUNICATOR_H_

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "comm/communicator.h"
#include "testing/gpt/testing/fault_plan.h"

namespace gpt {

// The trainer's all-reduce of "loss" ends a step. Before the fault a line goes
// to standard error: "injected kill into step 3 at 1763900000.123456", with the
// time of the host's clock.
std::unique_ptr<fsdp::comm::Communicator> WithFault(
    std::unique_ptr<fsdp::comm::Communicator> base, const Fault& fault);

// Makes steps take kSlowStep longer while there is a file `path`.
inline constexpr absl::Duration kSlowStep = absl::Milliseconds(200);
std::unique_ptr<fsdp::comm::Communicator> SlowWhile(
    std::unique_ptr<fsdp::comm::Communicator> base, const std::string& path);

}  // namespace gpt

#endif  // TESTING_GPT_TESTING_FAULTY_COMMUNICATOR_H_
