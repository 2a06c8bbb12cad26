// Explores runs of replicas that come, go, sleep and are cut off, as a seed
// decides: the real Membership over registers in memory, in one thread and on a
// simulated clock, watched by LogChecker.
#ifndef REPLICAS_MEMBERSHIP_TESTING_EXPLORER_H_
#define REPLICAS_MEMBERSHIP_TESTING_EXPLORER_H_

#include <cstdint>
#include <string>

namespace fsdp::replicas::testing {

struct Exploration {
  // Empty if all is as it should be and the run came to its end in time.
  std::string finding;
  bool had_faults = false;

  // Counts what was seen, so that a test can tell a batch that sees nothing.
  int64_t entries = 0;
  int64_t lost = 0;       // entries with that cause
  int64_t foundings = 0;  // after the first one
  int64_t joined = 0;     // new members
  int64_t evicted = 0;    // ranks that learned of it
  int64_t stalls = 0;     // within a call of Membership
  int64_t calls = 0;      // to the registers
};

Exploration Explore(uint64_t seed);

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_EXPLORER_H_
