// Scenarios that report when a promise of the protocols of comm/host and
// comm/shared_memory is broken.
#ifndef TESTING_INTERLEAVINGS_SCENARIOS_H_
#define TESTING_INTERLEAVINGS_SCENARIOS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "testing/interleavings/checker.h"

namespace fsdp::interleavings {

// One rank waits for `turns` messages of each of the others, of which its
// doorbell tells it. With `spins` it spins once before it sleeps.
MakeScenario Doorbells(int ranks, int turns, bool spins);
// A rank waits until a deadline for what never comes, while others ring.
MakeScenario DoorbellDeadline(int ranks);

// How ranks go on when others may have died or time may have run out.
enum class Failures {
  kNone,      // every call has to succeed
  kExpected,  // calls may fail, as for a rank that has lost a peer
};

// Every rank writes its part of common memory and passes a fence, reads all
// parts and passes another one, and so on, `fences` in all. Nobody passes
// before all have come.
MakeScenario Fences(int ranks, int fences, Failures failures = Failures::kNone);

struct Call {
  comm::Collective what;
  int64_t part = 1;  // elements; what a rank sends to each other one, or to all
};
enum class Memory {
  kPrivate,    // peers read a copy in a slot
  kSymmetric,  // peers read it where it is
};
struct CollectiveCalls {
  int ranks = 2;
  std::vector<Call> calls;
  Memory memory = Memory::kPrivate;
  // Starts all calls, then waits for all.
  bool in_flight_together = false;
  bool leave = false;
  Failures failures = Failures::kNone;
};
// Every rank gets what all ranks sent, once and in the order of the calls.
MakeScenario Calls(const CollectiveCalls& calls);

// The ranks' calls differ, which each rank is told.
MakeScenario Mismatch(int ranks);

// The last rank has posted as many calls as there is room for, and makes one
// more when the others have made the first.
MakeScenario RunAhead(int ranks, comm::Collective what);

// Rank 0 calls, and the last rank leaves instead.
MakeScenario LeaveInstead(int ranks);

// One thread of rank 0 waits for what never comes, another one aborts.
MakeScenario AbortWhileWaiting();

// A rank allocates memory that peers read, gives it back when it may, and does
// so again: what peers read then is new.
MakeScenario FreedMemory(int ranks);

// A scenario that is explored, with bounds that keep it short.
struct Case {
  std::string name;
  MakeScenario scenario;
  CheckOptions options;
};

// Returns the cases of 2 or 3 ranks.
std::vector<Case> AllCases(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_SCENARIOS_H_
