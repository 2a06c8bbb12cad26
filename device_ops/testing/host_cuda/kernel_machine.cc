#include "device_ops/testing/host_cuda/kernel_machine.h"

#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FSDP_ADDRESS_SANITIZER
#endif
#if __has_feature(thread_sanitizer)
#define FSDP_THREAD_SANITIZER
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define FSDP_ADDRESS_SANITIZER
#endif
#if defined(__SANITIZE_THREAD__)
#define FSDP_THREAD_SANITIZER
#endif

#if defined(FSDP_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(FSDP_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace fsdp::device_ops::testing {
namespace {

constexpr int kWarp = 32;
constexpr uint64_t kMaxLanes = 1024;
constexpr uint64_t kMaxBlocks = (uint64_t{1} << 31) - 1;

uint64_t Size(const dim3& extent) {
  return static_cast<uint64_t>(extent.x) * extent.y * extent.z;
}

uint3 At(int64_t index, const dim3& extent) {
  const auto at = static_cast<uint64_t>(index);
  return {static_cast<unsigned>(at % extent.x),
          static_cast<unsigned>(at / extent.x % extent.y),
          static_cast<unsigned>(at / extent.x / extent.y)};
}

// The stack has room for a copy of a kernel's arguments, 32 KB at most.
constexpr size_t kStackBytes = 256 << 10;

// Both are inlined: a function that is entered on one stack must not be left on
// another.
__attribute__((always_inline)) inline void BeginSwitch(
    [[maybe_unused]] void** frames_of_leaving,
    [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes,
    [[maybe_unused]] void* thread) {
#if defined(FSDP_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(frames_of_leaving, stack, bytes);
#endif
#if defined(FSDP_THREAD_SANITIZER)
  __tsan_switch_to_fiber(thread, 0);
#endif
}

__attribute__((always_inline)) inline void EndSwitch(
    [[maybe_unused]] void* frames_of_entered,
    [[maybe_unused]] const void** left_stack,
    [[maybe_unused]] size_t* left_bytes) {
#if defined(FSDP_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(frames_of_entered, left_stack, left_bytes);
#endif
}

}  // namespace

// A function with a stack of its own, which a thread runs for a while. Tells
// the sanitizers of addresses and of threads of each change. A fiber belongs to
// the thread that has made it.
class Fiber {
 public:
  // The first Resume() runs `body`, which never returns.
  explicit Fiber(std::function<void()> body)
      : body_(std::move(body)), stack_(new char[kStackBytes]) {
    FSDP_CHECK(getcontext(&own_) == 0);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    // makecontext() hands on integers only.
    const auto self = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(this));
    makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
#if defined(FSDP_THREAD_SANITIZER)
    own_thread_ = __tsan_create_fiber(0);
#endif
  }
  // Does not destroy what lies on the stack.
  ~Fiber() {
#if defined(FSDP_THREAD_SANITIZER)
    __tsan_destroy_fiber(own_thread_);
#endif
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Called outside of fibers: goes on with the body until it yields.
  void Resume() {
#if defined(FSDP_THREAD_SANITIZER)
    caller_thread_ = __tsan_get_current_fiber();
#endif
    BeginSwitch(&caller_frames_, stack_.get(), kStackBytes, own_thread_);
    FSDP_CHECK(swapcontext(&caller_, &own_) == 0);
    EndSwitch(caller_frames_, nullptr, nullptr);
  }
  // Called in the body: goes back to Resume().
  void Yield() {
    BeginSwitch(&own_frames_, caller_stack_, caller_stack_bytes_,
                caller_thread_);
    FSDP_CHECK(swapcontext(&own_, &caller_) == 0);
    EndSwitch(own_frames_, &caller_stack_, &caller_stack_bytes_);
  }

 private:
  static void Enter(unsigned high, unsigned low) {
    const uint64_t self = static_cast<uint64_t>(high) << 32 | low;
    // makecontext() passes nothing but ints.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(self));
    EndSwitch(nullptr, &fiber->caller_stack_, &fiber->caller_stack_bytes_);
    fiber->body_();
    FSDP_CHECK(false);
  }

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

KernelMachine::KernelMachine() = default;
KernelMachine::~KernelMachine() = default;

KernelMachine& KernelMachine::Get() {
  static thread_local KernelMachine machine;
  return machine;
}

std::vector<int> KernelMachine::InOrder(int count) {
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  if (order_ == Order::kReversed) std::reverse(all.begin(), all.end());
  if (order_ == Order::kShuffled) {
    std::shuffle(all.begin(), all.end(), random_);
  }
  return all;
}

cudaError_t KernelMachine::Launch(const cudaLaunchConfig_t& config,
                                  const std::function<void()>& lane) {
  launches_.push_back(config);
  failure_.clear();
  const uint64_t blocks = Size(config.gridDim);
  const uint64_t lanes = Size(config.blockDim);
  if (blocks == 0 || blocks > kMaxBlocks || lanes == 0 || lanes > kMaxLanes ||
      config.dynamicSmemBytes != 0) {
    failure_ = absl::StrCat("no launch of ", blocks, " blocks of ", lanes);
    return cudaErrorInvalidConfiguration;
  }
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  lane_ = &lane;
  for (int block : InOrder(static_cast<int>(blocks))) {
    blockIdx = At(block, gridDim);
    lanes_.assign(lanes, {});
    RunBlock();
    if (!failure_.empty()) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

void KernelMachine::RunBlock() {
  at_barrier_ = 0;
  ready_.clear();
  Release(InOrder(static_cast<int>(lanes_.size())));
  while (!ready_.empty() && failure_.empty()) {
    const int lane = ready_.front();
    if (lanes_[lane].state == State::kNew) {
      IdleFiber()->Resume();
    } else {
      ready_.pop_front();
      Enter(lane);
      lanes_[lane].fiber->Resume();
    }
  }
  const bool ended =
      std::all_of(lanes_.begin(), lanes_.end(),
                  [](const Lane& lane) { return lane.state == State::kDone; });
  if (!ended && failure_.empty()) Fail(WhoWaits());
  if (!failure_.empty()) {  // lanes are left in the middle of their work
    idle_.clear();
    fibers_.clear();
  }
}

// Lanes that wait for nobody need only one fiber together.
void KernelMachine::RunNewLanes(Fiber* self) {
  for (;;) {
    while (!ready_.empty() && lanes_[ready_.front()].state == State::kNew) {
      const int lane = ready_.front();
      ready_.pop_front();
      lanes_[lane].fiber = self;
      Enter(lane);
      (*lane_)();
      lanes_[lane].state = State::kDone;
    }
    idle_.push_back(self);
    self->Yield();
  }
}

Fiber* KernelMachine::IdleFiber() {
  if (idle_.empty()) {
    const size_t index = fibers_.size();
    fibers_.push_back(std::make_unique<Fiber>(
        [this, index] { RunNewLanes(fibers_[index].get()); }));
    return fibers_.back().get();
  }
  Fiber* const fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

void KernelMachine::Enter(int lane) {
  current_ = lane;
  lanes_[lane].state = State::kRuns;
  threadIdx = At(lane, blockDim);
}

void KernelMachine::Wait() { lanes_[current_].fiber->Yield(); }

void KernelMachine::Release(const std::vector<int>& lanes) {
  ready_.insert(ready_.end(), lanes.begin(), lanes.end());
}

void KernelMachine::SyncBlock(int line) {
  Lane& lane = lanes_[current_];
  lane.state = State::kAtBarrier;
  lane.line = line;
  ++at_barrier_;
  if (at_barrier_ == static_cast<int>(lanes_.size())) {
    for (const Lane& other : lanes_) {
      if (other.line != line) Fail(WhoWaits());
    }
    at_barrier_ = 0;
    Release(InOrder(static_cast<int>(lanes_.size())));
  }
  Wait();
}

uint64_t KernelMachine::ExchangeByXor(unsigned mask, uint64_t value,
                                      unsigned lane_mask, int line) {
  const int place = current_ % kWarp;
  const int warp = current_ - place;
  Lane& lane = lanes_[current_];
  lane.state = State::kExchanges;
  lane.line = line;
  lane.mask = mask;
  lane.source = (static_cast<unsigned>(place) ^ lane_mask) % kWarp;
  lane.value = value;
  if ((mask >> place & 1) == 0 || (mask >> lane.source & 1) == 0) {
    Fail(absl::StrCat("lane ", current_, " exchanges with lane ",
                      warp + static_cast<int>(lane.source), " in line ", line,
                      ", which the mask ", absl::Hex(mask), " lacks"));
  }
  if (AllExchange(warp, lane)) Exchange(warp, mask);
  Wait();
  return lane.value;
}

bool KernelMachine::AllExchange(int warp, const Lane& like) const {
  for (int i = 0; i < kWarp; ++i) {
    if ((like.mask >> i & 1) == 0) continue;
    if (warp + i >= static_cast<int>(lanes_.size())) return false;
    const Lane& lane = lanes_[warp + i];
    if (lane.state != State::kExchanges || lane.mask != like.mask ||
        lane.line != like.line) {
      return false;
    }
  }
  return true;
}

void KernelMachine::Exchange(int warp, unsigned mask) {
  std::vector<uint64_t> given(kWarp);
  for (int i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) != 0) given[i] = lanes_[warp + i].value;
  }
  std::vector<int> released;
  for (int i : InOrder(kWarp)) {
    if ((mask >> i & 1) == 0) continue;
    Lane& lane = lanes_[warp + i];
    lane.value = given[lane.source];
    lane.state = State::kRuns;
    released.push_back(warp + i);
  }
  Release(released);
}

void KernelMachine::Fail(const std::string& why) {
  if (!failure_.empty()) return;
  failure_ = absl::StrCat("block (", blockIdx.x, ", ", blockIdx.y, ", ",
                          blockIdx.z, "): ", why);
}

// Names one lane for each thing that lanes do.
std::string KernelMachine::WhoWaits() const {
  std::string text;
  std::vector<std::string> said;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Lane& lane = lanes_[i];
    std::string what =
        lane.state == State::kDone ? " has ended"
        : lane.state == State::kAtBarrier
            ? absl::StrCat(" waits at the barrier of line ", lane.line)
            : absl::StrCat(" exchanges in line ", lane.line);
    if (std::find(said.begin(), said.end(), what) != said.end()) continue;
    absl::StrAppend(&text, text.empty() ? "lane " : ", lane ", i, what);
    said.push_back(std::move(what));
  }
  return text;
}

}  // namespace fsdp::device_ops::testing
