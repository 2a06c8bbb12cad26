// Decides which thread goes next: depth-first through all interleavings that
// differ in the order of operations that conflict, each executed from its
// beginning.
//
// The method is dynamic partial-order reduction by source sets and sleep sets
// (Abdulla, Aronis, Jonsson and Sagonas, POPL 2014). With a bound on
// preemptions it is that of Flanagan and Godefroid (POPL 2005), without sleep
// sets and with the points that Coons, Musuvathi and McKinley add (OOPSLA
// 2013).
#ifndef TESTING_INTERLEAVINGS_SEARCH_H_
#define TESTING_INTERLEAVINGS_SEARCH_H_

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "testing/interleavings/vector_clock.h"

namespace fsdp::interleavings {

// Places that a step of a thread reads or writes; a place has the same number
// in every execution. Two steps conflict if both touch a place and one of them
// writes there.
struct Footprint {
  struct Place {
    uint64_t number = 0;
    bool writes = false;
  };
  std::array<Place, 3> places;
  int num_places = 0;
  // The step can come at another time. The end of a sleep, which somebody else
  // brings about, and the release of a mutex cannot.
  bool may_be_reordered = true;

  void Add(uint64_t number, bool writes) {
    places[num_places++] = {number, writes};
  }
  bool ConflictsWith(const Footprint& other) const;
};

struct Candidate {
  bool is_enabled = false;
  bool is_pending = false;      // it has a step to do, now or later
  bool is_environment = false;  // its steps preempt nobody
  Footprint next;
};
using Candidates = std::array<Candidate, kMaxThreads>;

class Search {
 public:
  static constexpr int kUnbounded = -1;
  explicit Search(int max_preemptions = kUnbounded)
      : max_preemptions_(max_preemptions) {}

  // Returns the thread whose step comes next, or none if what follows has been
  // explored already. Some thread is enabled.
  std::optional<int> ChooseThread(const Candidates& candidates);
  // Chooses one of `count` ways in which the step may end, once per step.
  int ChooseWay(int count);
  // Return what the thread that was chosen last followed before its step, in
  // the order in which conflicting steps were taken, and the last step of a
  // thread.
  const VectorClock& executed_before() const { return executed_before_; }
  Epoch last_step(int thread) const {
    return {thread, clocks_[thread][thread]};
  }
  // No thread could go on until time passed: all that comes follows it.
  void Synchronize();

  // Ends the execution; returns whether there is another one to explore.
  bool Finish(const Candidates& candidates);

 private:
  using Threads = uint32_t;  // a bit for each thread
  struct Node {
    Threads enabled = 0;
    Threads sleeping = 0;
    Threads backtrack = 0;
    Threads done = 0;
    int thread = -1;
    int way = 0;
    int num_ways = 1;
    int previous = -1;  // the thread of the step before
    int preemptions = 0;
  };
  struct Step {
    Epoch epoch;
    int index;
  };
  struct PlaceState {
    std::optional<Step> last_write;
    std::vector<Step> reads;  // since then
    VectorClock written;
    VectorClock touched;
  };

  bool is_bounded() const { return max_preemptions_ != kUnbounded; }
  bool Preempts(const Node& node, int thread) const;
  bool PushNode(const Candidates& candidates);
  void Execute(int thread, const Candidates& candidates);
  VectorClock ClockOf(int thread, const Footprint& step) const;
  void FindRaces(int thread, const Footprint& step, const VectorClock& clock);
  void AddBacktrack(const Step& racing, int thread, const VectorClock& clock);
  Threads InitialsOf(const Step& racing, int thread,
                     const VectorClock& clock) const;
  void AddBacktrackAt(int index, int thread);
  bool Advance();

  const int max_preemptions_;
  std::vector<Node> nodes_;
  Threads environment_ = 0;

  // These are of the execution under way.
  int depth_ = 0;
  int num_replayed_ = 0;  // nodes whose races are known
  int previous_ = -1;
  int preemptions_ = 0;
  Threads sleeping_ = 0;
  std::array<VectorClock, kMaxThreads> clocks_;
  VectorClock executed_before_;
  struct Taken {
    Epoch epoch;
    VectorClock follows;
  };
  std::vector<Taken> steps_;
  std::unordered_map<uint64_t, PlaceState> places_;
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_SEARCH_H_
