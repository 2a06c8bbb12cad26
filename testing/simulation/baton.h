// How threads of which one runs at a time hand on whose turn it is.
#ifndef TESTING_SIMULATION_BATON_H_
#define TESTING_SIMULATION_BATON_H_

#include <memory>

namespace fsdp::simulation {

// One thread's hand. The first that gives is that of a thread that runs; all
// others call Await() first.
class Baton {
 public:
  Baton() = default;
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;
  virtual ~Baton() = default;

  // In its thread; returns when it has been given the baton.
  virtual void Await() = 0;
  // In its thread, which has the baton: `next`, of the same kind, goes on.
  // Returns when the baton is back.
  virtual void GiveTo(Baton& next) = 0;
  // The same for the last time. The thread ends by itself after Release(), by
  // anybody, at the latest.
  virtual void GiveForEver(Baton& next) = 0;
  virtual void Release() = 0;
};

// Whether MakeSwitchingBaton() works here.
bool CanSwitchStacks();

// One thread of the system, whichever gave first, runs them all in turn, each
// on the stack and with the thread-local storage of a thread that sleeps: it
// takes nanoseconds to hand on. System calls see one thread, debuggers are
// confused.
std::unique_ptr<Baton> MakeSwitchingBaton();
// The system puts threads to sleep and wakes them: microseconds.
std::unique_ptr<Baton> MakeWakingBaton();

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_BATON_H_
