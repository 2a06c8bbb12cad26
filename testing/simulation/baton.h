// Threads of which one runs at a time hand on whose turn it is by batons.
#ifndef TESTING_SIMULATION_BATON_H_
#define TESTING_SIMULATION_BATON_H_

#include <memory>

namespace fsdp::simulation {

// Is one thread's hand. The first that gives is that of a thread that runs; all
// others call Await() first.
class Baton {
 public:
  Baton() = default;
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;
  virtual ~Baton() = default;

  // Is called in its thread; returns when it has been given the baton.
  virtual void Await() = 0;
  // Is called in its thread, which has the baton: `next`, of the same kind,
  // goes on. Returns when the baton is back.
  virtual void GiveTo(Baton& next) = 0;
  // Gives the baton for the last time. The thread ends by itself after
  // anybody's Release() at the latest.
  virtual void GiveForEver(Baton& next) = 0;
  virtual void Release() = 0;
};

// Returns whether MakeSwitchingBaton() works here.
bool CanSwitchStacks();

// One thread of the system, the first that gave, runs all of them in turn, each
// on the stack and with the thread-local storage of a thread that sleeps.
// Handing on takes nanoseconds. System calls see one thread, and debuggers are
// confused.
std::unique_ptr<Baton> MakeSwitchingBaton();
// The system puts threads to sleep and wakes them, which takes microseconds.
std::unique_ptr<Baton> MakeWakingBaton();

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_BATON_H_
