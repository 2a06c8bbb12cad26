// Finds unordered accesses to memory by vector clocks. Knows no torch.
#ifndef BASE_TESTING_HAPPENS_BEFORE_H_
#define BASE_TESTING_HAPPENS_BEFORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {

// Actors access memory: the host, and the streams it feeds. What an actor does
// is ordered; what two actors do is ordered where a wait says so. A stream
// runs what the host enqueues after all that the host has done so far. Two
// overlapping accesses of different actors, one of them a write, that nothing
// orders are a race, reported once for each pair of names. Not thread-safe.
class HappensBefore {
 public:
  // The knowledge of an actor: how far each actor is known to have come.
  using Clock = std::vector<int64_t>;

  struct Range {
    uintptr_t begin = 0;
    uintptr_t end = 0;
  };

  static constexpr int kHost = 0;
  static constexpr int ActorOf(int64_t stream) {
    return static_cast<int>(stream) + 1;
  }

  // Records an event on the actor's queue and returns what a wait for it
  // orders.
  Clock Record(int actor);
  // Orders what `actor` does from now on behind `event`.
  void Wait(int actor, const Clock& event);
  // Lets the host wait for all streams.
  void WaitForAll();

  // Notes an access; `what` names the operation in reports.
  void Access(int actor, const std::vector<Range>& ranges, bool writes,
              const std::string& what);
  // Does the same as a write, but ignores the accesses of `spared` actors and
  // those that they have waited for. Then forgets the range, as Forget() does.
  void Free(int actor, Range range, const std::vector<int>& spared,
            const std::string& what);
  // Forgets the history of memory that gets a new owner.
  void Forget(Range range);

  // Forgets all accesses and races. Clocks go on.
  void Reset();
  const std::vector<std::string>& races() const { return races_; }

 private:
  struct Visit {
    int actor = kHost;
    int64_t time = 0;  // zero: none
    std::shared_ptr<const std::string> what;
  };
  // Bytes with one history: the last write, and the reads since, by actor.
  struct Segment {
    uintptr_t end = 0;
    Visit write;
    std::vector<Visit> reads;
  };

  Clock& ClockOf(int actor);
  // Returns the time of an actor that is about to do something.
  int64_t Advance(int actor);
  bool Knows(int actor, const Visit& visit);
  void Split(uintptr_t at);
  void Apply(Segment& segment, uintptr_t begin, const Visit& visit,
             bool writes);
  void Check(const Segment& segment, uintptr_t begin, const Visit& visit,
             bool writes, const std::vector<int>& spared);
  void Report(const Visit& earlier, bool earlier_writes, const Visit& later,
              bool later_writes, int64_t bytes);

  std::vector<Clock> clocks_;
  std::map<uintptr_t, Segment> segments_;  // by first byte, disjoint
  std::vector<std::string> races_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_HAPPENS_BEFORE_H_
