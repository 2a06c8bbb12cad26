// What the protocols of comm/host and comm/shared_memory promise, as scenarios
// that report it when a promise is broken.
#ifndef TESTING_INTERLEAVINGS_SCENARIOS_H_
#define TESTING_INTERLEAVINGS_SCENARIOS_H_

#include <vector>

#include "testing/interleavings/checker.h"

namespace fsdp::interleavings {

// One rank waits for `turns` messages of each of the others, which it is told
// of by its doorbell; spins once before it sleeps, if it is to.
MakeScenario Doorbells(int ranks, int turns, bool spins);
// A waiter for nothing, until a deadline, while others ring.
MakeScenario DoorbellDeadline(int ranks);

// How ranks go on when others may have died, or time may have run out.
enum class Failures {
  kNone,      // every call has to succeed
  kExpected,  // may fail, as one does who has lost a peer
};

// Every rank writes its part of common memory and passes a fence, reads all
// parts and passes another one, and so on: `fences` in all. Nobody passes
// before all have come.
MakeScenario Fences(int ranks, int fences, Failures failures = Failures::kNone);

// A model of two units whose shards lie in common memory is trained as the real
// Schedule says: ranks compute with each other's shards, and write their own in
// place, as an optimizer does, between steps.
struct Training {
  int ranks = 2;
  int steps = 2;
  // A forward alone, without gradients, in each step.
  bool evaluates = false;
  // Asks for a unit's parameters before the optimizer's step (Unshard()).
  bool user_unshards = false;
  // What is left out, on all ranks: the nth fence from 0, waits for reductions.
  int left_out_fence = -1;
  bool leaves_out_reductions = false;
  // As it once was: what the user asks for opens shards and is gathered in
  // place, and the forward that comes next finds them open.
  bool unsharding_opens = false;
};
MakeScenario TrainingSteps(Training training);

enum class Collectives {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kLargeAllReduce,  // by parts
  kBroadcast,
  kLongBroadcast,  // more chunks than are staged ahead
};
enum class Memory {
  kPrivate,    // peers read a copy in a slot
  kSymmetric,  // peers read it where it is
};
struct CollectiveCalls {
  int ranks = 2;
  std::vector<Collectives> calls;
  Memory memory = Memory::kPrivate;
  // Start all, then wait for all.
  bool in_flight_together = false;
  // Wait() for inputs, too, before they are written again.
  bool waits_for_inputs = true;
  // Ranks leave as soon as they are done.
  bool leave = false;
  Failures failures = Failures::kNone;
};
// Every rank gets what all ranks sent, once and in the order of the calls.
MakeScenario Calls(const CollectiveCalls& calls);

// The ranks' calls differ: everybody is told.
MakeScenario Mismatch(int ranks);

// The last rank has posted as many calls as there is room for, and makes one
// more when the others have made the first.
MakeScenario RunAhead(int ranks, Collectives what);

// Rank 0 calls, and the last rank leaves instead.
MakeScenario LeaveInstead(int ranks);

// One thread of rank 0 waits for what never comes, another one aborts.
MakeScenario AbortWhileWaiting();

// A rank allocates memory that peers read, gives it back when it may, and does
// it again: what peers read then is new.
MakeScenario FreedMemory(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_SCENARIOS_H_
