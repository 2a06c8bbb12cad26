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
// parts and passes another one, `rounds` times. Nobody passes before all have
// come.
MakeScenario Fences(int ranks, int rounds, Failures failures = Failures::kNone);

// Steps of training in common memory: all ranks gather, and read all shards;
// then each writes its own in place, as an optimizer does.
struct TrainingFences {
  bool open = true;   // before shards are read
  bool close = true;  // before they are written
};
MakeScenario TrainingSteps(int ranks, int steps, TrainingFences fences);

enum class Collectives {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kLargeAllReduce,  // by parts
  kBroadcast,
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
  // Calls before those that are explored.
  int earlier_calls = 0;
  // Ranks leave as soon as they are done.
  bool leave = false;
  Failures failures = Failures::kNone;
};
// Every rank gets what all ranks sent, once and in the order of the calls.
MakeScenario Calls(CollectiveCalls calls);

// The ranks' calls differ: everybody is told.
MakeScenario Mismatch(int ranks);

// One thread of rank 0 waits for what never comes, another one aborts.
MakeScenario AbortWhileWaiting();

// A rank allocates memory that peers read, gives it back when it may, and does
// it again: what peers read then is new.
MakeScenario FreedMemory(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_SCENARIOS_H_
