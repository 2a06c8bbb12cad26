#include "testing/interleavings/search.h"

#include "base/check.h"

namespace fsdp::interleavings {
namespace {

constexpr uint32_t Bit(int thread) { return uint32_t{1} << thread; }

int Lowest(uint32_t threads) { return __builtin_ctz(threads); }

}  // namespace

bool Footprint::ConflictsWith(const Footprint& other) const {
  for (int i = 0; i < num_places; ++i) {
    for (int k = 0; k < other.num_places; ++k) {
      if (places[i].number == other.places[k].number &&
          (places[i].writes || other.places[k].writes)) {
        return true;
      }
    }
  }
  return false;
}

bool Search::Preempts(const Node& node, int thread) const {
  return node.previous >= 0 && node.previous != thread &&
         (node.enabled & Bit(node.previous)) != 0 &&
         (environment_ & Bit(thread)) == 0;
}

// Adds a node; returns whether some thread is worth exploring.
bool Search::PushNode(const Candidates& candidates) {
  Node node;
  for (int i = 0; i < kMaxThreads; ++i) {
    if (candidates[i].is_enabled) node.enabled |= Bit(i);
    if (candidates[i].is_environment) environment_ |= Bit(i);
  }
  node.sleeping = sleeping_ & node.enabled;
  node.previous = previous_;
  node.preemptions = preemptions_;
  const Threads awake = node.enabled & ~node.sleeping;
  if (awake == 0) return false;
  const Threads ranks = awake & ~environment_;
  if (previous_ >= 0 && (ranks & Bit(previous_)) != 0) {
    node.thread = previous_;
  } else {
    node.thread = Lowest(ranks != 0 ? ranks : awake);
  }
  node.backtrack = Bit(node.thread);
  nodes_.push_back(node);
  return true;
}

std::optional<int> Search::ChooseThread(const Candidates& candidates) {
  if (depth_ == static_cast<int>(nodes_.size()) && !PushNode(candidates)) {
    return std::nullopt;
  }
  const int thread = nodes_[depth_].thread;
  // Executions are the same up to here.
  FSDP_CHECK(candidates[thread].is_enabled);
  Execute(thread, candidates);
  ++depth_;
  return thread;
}

// Returns what the step follows if it is taken now.
VectorClock Search::ClockOf(int thread, const Footprint& step) const {
  VectorClock clock = clocks_[thread];
  ++clock[thread];
  for (int i = 0; i < step.num_places; ++i) {
    const auto place = places_.find(step.places[i].number);
    if (place == places_.end()) continue;
    clock.Join(step.places[i].writes ? place->second.touched
                                     : place->second.written);
  }
  return clock;
}

void Search::Execute(int thread, const Candidates& candidates) {
  const Node& node = nodes_[depth_];
  const Footprint& step = candidates[thread].next;
  const VectorClock clock = ClockOf(thread, step);
  if (depth_ >= num_replayed_) FindRaces(thread, step, clock);
  // Threads that sleep, or have been explored here, need not go before what
  // does not conflict with them.
  sleeping_ = 0;
  if (!is_bounded()) {
    const Threads explored = (node.sleeping | node.done) & ~Bit(thread);
    for (int i = 0; i < kMaxThreads; ++i) {
      if ((explored & Bit(i)) != 0 && !candidates[i].next.ConflictsWith(step)) {
        sleeping_ |= Bit(i);
      }
    }
  }
  if (Preempts(node, thread)) ++preemptions_;
  if ((environment_ & Bit(thread)) == 0) previous_ = thread;

  executed_before_ = clocks_[thread];
  clocks_[thread] = clock;
  const Step taken = {{thread, clock[thread]}, depth_};
  steps_.push_back({taken.epoch, clock});
  for (int i = 0; i < step.num_places; ++i) {
    PlaceState& place = places_[step.places[i].number];
    place.touched.Join(clock);
    if (step.places[i].writes) place.written.Join(clock);
    if (!step.may_be_reordered) continue;
    if (step.places[i].writes) {
      place.last_write = taken;
      place.reads.clear();
    } else {
      place.reads.push_back(taken);
    }
  }
}

// Finds steps that `step` could precede; `clock` is what it follows now.
void Search::FindRaces(int thread, const Footprint& step,
                       const VectorClock& clock) {
  if (!step.may_be_reordered) return;
  for (int i = 0; i < step.num_places; ++i) {
    const auto found = places_.find(step.places[i].number);
    if (found == places_.end()) continue;
    const PlaceState& place = found->second;
    if (step.places[i].writes) {
      for (const Step& read : place.reads) AddBacktrack(read, thread, clock);
    }
    if (place.last_write) AddBacktrack(*place.last_write, thread, clock);
  }
}

void Search::AddBacktrack(const Step& racing, int thread,
                          const VectorClock& clock) {
  if (racing.epoch.thread == thread || clocks_[thread].Covers(racing.epoch)) {
    return;
  }
  Node& node = nodes_[racing.index];
  if (!is_bounded()) {
    const Threads initials = InitialsOf(racing, thread, clock) & node.enabled;
    if ((initials & node.backtrack) != 0) return;
    node.backtrack |= initials != 0 ? Bit(Lowest(initials)) : node.enabled;
    return;
  }
  AddBacktrackAt(racing.index, thread);
  int begin = racing.index;
  while (begin > 0 && nodes_[begin - 1].thread == nodes_[begin].thread) --begin;
  if (begin != racing.index) AddBacktrackAt(begin, thread);
}

// Returns the threads that can go first, instead of the racing step, in a run
// of all steps that do not follow it and then the step of `thread`.
Search::Threads Search::InitialsOf(const Step& racing, int thread,
                                   const VectorClock& clock) const {
  Threads initials = 0;
  Threads seen = 0;
  VectorClock firsts;  // the first step of each thread that was considered
  const auto consider = [&](Epoch epoch, const VectorClock& follows) {
    if ((seen & Bit(epoch.thread)) != 0) return;
    bool is_first = true;
    for (int i = 0; i < kMaxThreads; ++i) {
      if ((seen & Bit(i)) != 0 && follows[i] >= firsts[i]) is_first = false;
    }
    seen |= Bit(epoch.thread);
    firsts[epoch.thread] = epoch.time;
    if (is_first) initials |= Bit(epoch.thread);
  };
  for (int i = racing.index + 1; i < depth_; ++i) {
    if (steps_[i].follows.Covers(racing.epoch)) continue;
    consider(steps_[i].epoch, steps_[i].follows);
  }
  consider({thread, clock[thread]}, clock);
  return initials;
}

void Search::AddBacktrackAt(int index, int thread) {
  Node& node = nodes_[index];
  const bool enabled = (node.enabled & Bit(thread)) != 0;
  node.backtrack |= enabled ? Bit(thread) : node.enabled;
}

int Search::ChooseWay(int count) {
  Node& node = nodes_[depth_ - 1];
  if (count > 1) node.num_ways = count;
  FSDP_CHECK(node.way < node.num_ways);
  return count > 1 ? node.way : 0;
}

void Search::Synchronize() {
  VectorClock all;
  for (const VectorClock& clock : clocks_) all.Join(clock);
  clocks_.fill(all);
}

// Moves to the next choice not made yet; returns whether there is one.
bool Search::Advance() {
  while (!nodes_.empty()) {
    Node& node = nodes_.back();
    if (node.way + 1 < node.num_ways) {
      ++node.way;
      return true;
    }
    node.done |= Bit(node.thread);
    Threads rest = node.backtrack & ~node.done & ~node.sleeping;
    while (rest != 0) {
      const int thread = Lowest(rest);
      if (!is_bounded() ||
          node.preemptions + (Preempts(node, thread) ? 1 : 0) <=
              max_preemptions_) {
        node.thread = thread;
        node.way = 0;
        node.num_ways = 1;
        return true;
      }
      rest &= ~Bit(thread);
    }
    nodes_.pop_back();
  }
  return false;
}

bool Search::Finish(const Candidates& candidates) {
  // These steps were never taken: their threads sleep, wait or are dead.
  for (int i = 0; i < kMaxThreads; ++i) {
    const Footprint& next = candidates[i].next;
    if (candidates[i].is_pending) FindRaces(i, next, ClockOf(i, next));
  }
  nodes_.resize(depth_);
  const bool is_left = Advance();
  num_replayed_ = static_cast<int>(nodes_.size()) - 1;
  depth_ = 0;
  previous_ = -1;
  preemptions_ = 0;
  sleeping_ = 0;
  clocks_ = {};
  places_.clear();
  steps_.clear();
  return is_left;
}

}  // namespace fsdp::interleavings
