// A function with a stack of its own, which a thread runs for a while.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace fsdp::device_ops::testing {

// The sanitizers of addresses and of threads are told of the changes. A fiber
// belongs to the thread that has made it.
class Fiber {
 public:
  // `body` is run by the first Resume() and never returns.
  explicit Fiber(std::function<void()> body);
  // What lies on the stack is not destroyed.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Outside of fibers: goes on with the body until it yields.
  void Resume();
  // In the body.
  void Yield();

 private:
  static void Enter(unsigned high, unsigned low);

  const std::function<void()> body_;
  const std::unique_ptr<char[]> stack_;
  ucontext_t own_;
  ucontext_t caller_;
  // For the sanitizers.
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
  void* own_frames_ = nullptr;
  void* caller_frames_ = nullptr;
  void* own_thread_ = nullptr;
  void* caller_thread_ = nullptr;
};

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_FIBER_H_
