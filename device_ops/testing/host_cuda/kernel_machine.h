// Runs CUDA kernels on the host, for tests: compiled as C++ against the headers
// of this folder, which have the toolkit's names.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_KERNEL_MACHINE_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_KERNEL_MACHINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_ops/testing/host_cuda/cuda_runtime_api.h"

// NOLINTBEGIN: the names are CUDA's. They belong to the thread ("lane") of a
// block that runs at the moment.
inline thread_local uint3 threadIdx;
inline thread_local uint3 blockIdx;
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;
// NOLINTEND

namespace fsdp::device_ops::testing {

class Fiber;

// The order of blocks, and of lanes that need not wait.
enum class Order { kForward, kReversed, kShuffled };

// Runs each launch at once, in the calling thread. Blocks come one after the
// other. A lane runs until it ends or has to wait for others, at a barrier or
// in an exchange with its warp. A result that depends on the order is a race:
// one of the orders shows it if lanes of a block race without a barrier.
//
// A launch fails, with a text, if lanes wait in vain for others that have ended
// or wait elsewhere, which CUDA forbids.
class KernelMachine {
 public:
  KernelMachine();
  ~KernelMachine();
  // Returns the machine of this thread.
  static KernelMachine& Get();

  void set_order(Order order) { order_ = order; }
  // Returns the launches since the caller has last cleared them.
  std::vector<cudaLaunchConfig_t>& launches() { return launches_; }
  // Returns why the last launch failed, or "".
  const std::string& failure() const { return failure_; }

  // Runs `lane` for each lane of each block.
  cudaError_t Launch(const cudaLaunchConfig_t& config,
                     const std::function<void()>& lane);

  // Called by lanes, which wait for all of the block, or for those of the warp
  // in `mask`. A `line` of the source that is not the same for all is a
  // failure.
  void SyncBlock(int line);
  uint64_t ExchangeByXor(unsigned mask, uint64_t value, unsigned lane_mask,
                         int line);

 private:
  enum class State : uint8_t { kNew, kRuns, kAtBarrier, kExchanges, kDone };
  struct Lane {
    State state = State::kNew;
    Fiber* fiber = nullptr;
    int line = 0;
    unsigned mask = 0;
    unsigned source = 0;  // lane in the warp
    uint64_t value = 0;   // given, then received
  };

  // Returns 0 to `count` - 1 in the order asked for.
  std::vector<int> InOrder(int count);
  void RunBlock();
  // Runs in a fiber, as its body.
  void RunNewLanes(Fiber* self);
  Fiber* IdleFiber();
  void Enter(int lane);
  // Waits until the current lane is ready again.
  void Wait();
  bool AllExchange(int warp, const Lane& like) const;
  void Exchange(int warp, unsigned mask);
  void Release(const std::vector<int>& lanes);
  void Fail(const std::string& why);
  std::string WhoWaits() const;

  Order order_ = Order::kForward;
  std::mt19937 random_;
  std::vector<cudaLaunchConfig_t> launches_;
  std::string failure_;

  const std::function<void()>* lane_ = nullptr;
  std::vector<Lane> lanes_;  // of the block
  std::deque<int> ready_;
  int current_ = 0;
  int at_barrier_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_KERNEL_MACHINE_H_
