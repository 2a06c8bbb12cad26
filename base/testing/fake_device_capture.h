// The record of a FakeDeviceGraph. For fake_device*.cc only.
#ifndef BASE_TESTING_FAKE_DEVICE_CAPTURE_H_
#define BASE_TESTING_FAKE_DEVICE_CAPTURE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/happens_before.h"

namespace fsdp::testing::fake_device {

// One capture, under way or over. Operations run while it is under way, since
// only that tells what they return; at its end, what they have written is put
// back. Not thread-safe: State locks.
class Capture {
 public:
  using Range = HappensBefore::Range;
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

}  // namespace fsdp::testing::fake_device

#endif  // BASE_TESTING_FAKE_DEVICE_CAPTURE_H_
