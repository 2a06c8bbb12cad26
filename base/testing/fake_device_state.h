// State that the parts of the fake device share. For fake_device*.cc only.
#ifndef BASE_TESTING_FAKE_DEVICE_STATE_H_
#define BASE_TESTING_FAKE_DEVICE_STATE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/testing/fake_device.h"
#include "base/testing/happens_before.h"

namespace fsdp::testing::fake_device {

using Range = HappensBefore::Range;

// The record of a FakeDeviceGraph: one capture, under way or over. Operations
// run while it is under way, since only that tells what they return; at its
// end, what they have written is put back. Not thread-safe: State locks.
class Capture {
 public:
  // Names streams by their numbers here and below.
  explicit Capture(int64_t origin);
  ~Capture();

  // --- Under way ----------------------------------------------------------
  bool Has(int64_t stream) const { return streams_.count(stream) > 0; }
  bool IsOfThisThread() const { return thread_ == std::this_thread::get_id(); }
  // The first reason stays.
  void Invalidate(const std::string& reason);

  void Allocate(int64_t stream, Range range, const std::string& what);
  void Free(int64_t stream, Range range, const std::vector<int64_t>& spared,
            const std::string& what);
  // Called before the operation.
  void Access(int64_t stream, const std::vector<Range>& ranges, bool writes,
              const std::string& what);
  // Adds what has just been done, to be done again. Knows no State.
  void Run(int64_t stream, std::function<void()> run);
  // Returns the number of the event.
  int Record(int64_t stream);
  void Wait(int64_t stream, int event);

  // Puts memory back and spoils the graph's own. Returns why it cannot be
  // replayed, or "".
  std::string End(int64_t stream);

  // --- Over, or under way -------------------------------------------------
  // Keeps memory of the graph's own whose tensors are gone.
  void Keep(c10::DataPtr memory) { kept_.push_back(std::move(memory)); }
  // Notes that recorded memory of others is gone.
  void NoteFreed(Range range, const std::string& what);
  const std::string& freed() const { return freed_; }

  // Replay() does everything again, by an actor for each of these streams.
  const std::vector<int64_t>& streams() const { return stream_list_; }
  void Replay(HappensBefore& order, int caller,
              const std::map<int64_t, int>& actors);

  // Returns a line for each operation: its stream's place among streams(), its
  // name, what it reads and writes. Memory of others is named by address, the
  // graph's own by the place of its allocation.
  std::vector<std::string> Operations() const;

 private:
  struct Node {
    enum class Kind { kRun, kAllocate, kFree, kAccess, kRecord, kWait };
    Kind kind;
    int64_t stream;
    std::vector<Range> ranges = {};
    bool writes = false;
    std::string what = {};
    std::vector<int64_t> spared = {};
    int event = 0;
    std::function<void()> run = {};
  };
  struct Saved {
    uintptr_t begin;
    std::vector<char> bytes;
  };

  void Join(int64_t stream);
  void Note(int64_t stream);
  bool IsOwn(const Range& range) const;
  std::string Describe(const Range& range) const;

  const std::thread::id thread_ = std::this_thread::get_id();
  const int64_t origin_;
  at::Tensor generator_;  // the state of random numbers before
  std::string invalid_;
  std::string freed_;
  std::map<int64_t, int64_t> streams_;  // and when each was last given work
  std::vector<int64_t> stream_list_;
  std::vector<Node> nodes_;
  HappensBefore order_;  // of the capture
  std::vector<HappensBefore::Clock> events_;
  std::map<uintptr_t, uintptr_t> own_;  // begin and end
  std::vector<Saved> saved_;
  std::vector<Range> others_;
  std::vector<c10::DataPtr> kept_;
};

inline c10::Device TheDevice() {
  return c10::Device(c10::DeviceType::PrivateUse1, 0);
}

// Memory of the device, which its DataPtr owns.
struct Allocation {
  c10::DataPtr memory;  // host memory
  Range range;
  int actor = 0;                 // stream that it belongs to
  std::vector<int64_t> spared;   // streams whose use its end waits for
  std::weak_ptr<Capture> owner;  // capture of the graph whose memory it is
  bool is_captured = false;      // there is, or was, an owner
};

// The content of an event.
struct Point {
  HappensBefore::Clock clock;
  // The capture in which it was recorded, if any, and its number there.
  bool is_captured = false;
  std::weak_ptr<Capture> capture;
  int event = 0;
};

// The state lives as long as the process: memory may be freed at its very end.
class State {
 public:
  static State& Get();

  // Returns the stream that is current in this thread.
  static int64_t CurrentStream();
  static int64_t ExchangeStream(int64_t stream);
  static int CurrentActor() { return HappensBefore::ActorOf(CurrentStream()); }

  // Makes memory of the device out of host memory of `bytes`.
  c10::DataPtr Adopt(c10::DataPtr memory, size_t bytes);
  // Allocates host memory whose end waits for the copies to and from it.
  c10::DataPtr AllocatePinned(size_t bytes);
  void Pin(void* memory, int64_t bytes);
  // Races with a copy that is under way.
  void Unpin(void* memory);
  bool IsPinned(const void* data);
  void RecordOnStream(const void* data, int64_t stream);

  void Access(int actor, const at::Tensor& tensor, bool writes,
              absl::string_view what);
  // Notes a copy's access to the host memory of `tensor`. The access is
  // forgotten with memory of the CPU's allocator, which tells nobody when it
  // goes and comes.
  void AccessHost(int actor, const at::Tensor& tensor, bool writes,
                  absl::string_view what);

  Point Record(int64_t stream);
  void Block(int64_t stream, const Point& event);
  // The host learns that what `event` stands for is done.
  void Learn(const Point& event);
  // The host waits for the event, or for all streams.
  void HostWait(const Point& event, absl::string_view what);
  void HostWaitForStream(int64_t stream, absl::string_view what);
  // The host may wait, which nothing can rely on.
  void HostMayWait(absl::string_view what);
  void HostWaitForAll(absl::string_view what);

  // Captures (FakeDeviceGraph). While one is under way, calls above and
  // below that CUDA would refuse throw, and the capture cannot be used.
  // BeginCapture() returns false if another capture is under way.
  bool BeginCapture(std::shared_ptr<Capture> capture);
  // Returns why the capture under way cannot be used, or "".
  std::string EndCapture();
  // Returns whether AddRun() has to be told what the current stream is given.
  bool Captures();
  // Adds what the current stream has been given, to be done in replays.
  void AddRun(std::function<void()> run);
  // Returns why it is not done, or "".
  std::string Replay(Capture& capture, const std::map<int64_t, int>& actors);
  // Throws if a capture is under way.
  void RefuseInCapture(absl::string_view what);

  bool Stalled();
  void Stall(int by);
  int64_t NewStream(bool from_pool, bool high_priority);

  // Counts one more call of `what`.
  void Count(int64_t FakeDevice::Calls::*what);

 private:
  friend class ::fsdp::testing::FakeDevice;
  struct HostMemory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Range range;
  };

  template <typename Get>
  auto Locked(Get get) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return get(*this);
  }
  static void Free(void* allocation);
  bool FreeCaptured(Allocation& allocation);
  void AccessLocked(int actor, const std::vector<Range>& ranges, bool writes,
                    absl::string_view what);
  // Returns the capture under way if it has `stream`, and throws if it has
  // others.
  Capture* CaptureOf(int64_t stream, absl::string_view what);
  [[noreturn]] void Refuse(absl::string_view what);
  void CheckHostMayWait(const Point& event, absl::string_view what);
  static void FreePinned(void* allocation);
  void ForgetHostMemoryThatWent();

  std::mutex mutex_;
  HappensBefore order_;
  std::map<uintptr_t, Allocation*> allocations_;  // by first byte
  std::map<uintptr_t, Range> pinned_;
  std::vector<HostMemory> host_memory_;
  std::vector<std::string> host_waits_;
  FakeDevice::Calls calls_;
  int64_t in_use_ = 0;
  int64_t peak_ = 0;
  int stalls_ = 0;
  std::shared_ptr<Capture> capture_;              // under way
  std::vector<std::weak_ptr<Capture>> captures_;  // over, too
  int64_t streams_ = 0;
  int64_t pooled_[2] = {0, 0};  // by high priority
};

// Returns the bytes of a tensor's elements, in ascending ranges.
std::vector<Range> RangesOf(const at::Tensor& tensor);

c10::Allocator* DeviceAllocator();

void RegisterRuntime();    // streams, events, allocators, hooks
void RegisterOperators();  // kernels

}  // namespace fsdp::testing::fake_device

#endif  // BASE_TESTING_FAKE_DEVICE_STATE_H_
