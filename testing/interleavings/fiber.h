// Threads of a model: they run one at a time, each on its own stack, and switch
// where they say so.
#ifndef TESTING_INTERLEAVINGS_FIBER_H_
#define TESTING_INTERLEAVINGS_FIBER_H_

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <memory>

namespace fsdp::interleavings {

// Runs one function after another; one system thread makes all its switches.
class Fiber {
 public:
  // `at_end` runs on the fiber whenever a function has ended, and switches
  // away.
  explicit Fiber(std::function<void()> at_end);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Sets what the next switch to this fiber begins; the last one has ended.
  void Start(std::function<void()> function);
  // Runs on the caller's own stack until somebody switches back there.
  static void Switch(jmp_buf* from, Fiber* to);
  static void Switch(Fiber* from, Fiber* to);
  static void Switch(Fiber* from, jmp_buf* to);

 private:
  static void Enter(unsigned low, unsigned high);
  void Loop();
  void Resume();

  struct Unmapper {
    void operator()(void* stack) const;
  };
  std::unique_ptr<void, Unmapper> stack_;
  ucontext_t context_;
  jmp_buf state_;
  bool has_begun_ = false;
  const std::function<void()> at_end_;
  std::function<void()> function_;
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_FIBER_H_
