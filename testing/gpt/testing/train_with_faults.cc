// Runs testing/gpt:train with faults, for tests. The environment says which:
//   GPT_FAULT_PLAN       ParseFaultPlan()
//   GPT_TIMEOUT_S        ConnectOptions::timeout
//   GPT_CONNECT_TIMEOUT_S
//   GPT_LOSS_TIMEOUT_S   ReplicaOptions::loss_timeout
//   GPT_SLOW_WHILE       SlowWhile(), a path
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/time/time.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "replicas/replicas.h"
#include "testing/gpt/testing/faults.h"
#include "testing/gpt/train_program.h"

namespace gpt {
namespace {

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int Number(const char* name) {
  int number = 0;
  return absl::SimpleAtoi(Variable(name), &number) ? number : 0;
}

void ReadSeconds(const char* name, absl::Duration* duration) {
  int seconds = 0;
  if (absl::SimpleAtoi(Variable(name), &seconds)) {
    *duration = absl::Seconds(seconds);
  }
}

int Main(int argc, char** argv) {
  const absl::StatusOr<std::vector<Fault>> plan =
      ParseFaultPlan(Variable("GPT_FAULT_PLAN"));
  if (!plan.ok()) {
    std::cerr << plan.status() << std::endl;
    return 2;
  }
  TrainHooks hooks;
  hooks.connecting = [](fsdp::comm::ConnectOptions& options) {
    ReadSeconds("GPT_TIMEOUT_S", &options.timeout);
    ReadSeconds("GPT_CONNECT_TIMEOUT_S", &options.connect_timeout);
  };
  hooks.joining = [](fsdp::ReplicaOptions& options) {
    ReadSeconds("GPT_LOSS_TIMEOUT_S", &options.loss_timeout);
  };
  hooks.connected = [&plan](std::unique_ptr<fsdp::comm::Communicator> ranks) {
    const std::optional<Fault> fault =
        FaultOf(*plan, Number("TORCHELASTIC_RESTART_COUNT"),
                Number("FSDP_REPLICA"), ranks->rank());
    const std::string slow_while = Variable("GPT_SLOW_WHILE");
    if (!slow_while.empty()) ranks = SlowWhile(std::move(ranks), slow_while);
    return fault.has_value() ? WithFault(std::move(ranks), *fault)
                             : std::move(ranks);
  };
  return TrainProgram(argc, argv, /*nccl_on=*/nullptr, hooks);
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) { return gpt::Main(argc, argv); }
