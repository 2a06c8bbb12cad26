// A function with a stack of its own, which a thread runs for a while.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace fsdp::device_ops::testing {

// Tells the sanitizers of addresses and of threads of each change. A fiber
// belongs to the thread that has made it.
class Fiber {
 public:
  // The first Resume() runs `body`, which never returns.
  explicit Fiber(std::function<void()> body);
  // Does not destroy what lies on the stack.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Called outside of fibers: goes on with the body until it yields.
  void Resume();
  // Called in the body: goes back to Resume().
  void Yield();

 private:
  static void Enter(unsigned high, unsigned low);

  const std::function<void()> body_;
  const std::unique_ptr<char[]> stack_;
  ucontext_t own_;
  ucontext_t caller_;
  // The sanitizers need these.
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
  void* own_frames_ = nullptr;
  void* caller_frames_ = nullptr;
  void* own_thread_ = nullptr;
  void* caller_thread_ = nullptr;
};

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_
