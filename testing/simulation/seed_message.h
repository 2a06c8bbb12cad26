// A message in which a process tells another one about a seed.
#ifndef TESTING_SIMULATION_SEED_MESSAGE_H_
#define TESTING_SIMULATION_SEED_MESSAGE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {

struct SeedMessage {
  int64_t seed = 0;
  SeedResult result;  // without its log
};

std::string ToBytes(const SeedMessage& message);
// Takes the first message from the front of `bytes` once it is complete.
std::optional<SeedMessage> TakeMessage(std::string& bytes);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SEED_MESSAGE_H_
