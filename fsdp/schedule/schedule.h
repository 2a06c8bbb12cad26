// The control plane of FSDP: decides when each unit is gathered, freed and
// reduced. It uses no tensors, threads or clock, so that a step can be tested,
// drawn and simulated without a model.
//
// The runtime reports what happens in the model as events and carries out the
// actions it gets back, in order. The policy is that of ZeRO stage 3
// (Rajbhandari et al., 2020) with the prefetching of PyTorch FSDP (Zhao et al.,
// 2023): gather a unit before it computes, free it afterwards, start the gather
// of the next unit, reduce gradients as soon as they are complete.
#ifndef FSDP_SCHEDULE_SCHEDULE_H_
#define FSDP_SCHEDULE_SCHEDULE_H_

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

struct ScheduledUnit {
  std::string name;  // for messages
  int parent = -1;   // index of the surrounding unit; -1 for the root, unit 0
  bool reshard_after_forward = true;
  // With reshard_after_forward, the rank keeps a larger part than its shard
  // between forward and backward, and a smaller group gathers from it for
  // backward (hpZ in ZeRO++, Wang et al., 2023).
  bool keeps_part = false;
  // The unit stays gathered over backwards that do not synchronise.
  bool keep_until_sync = false;
  // Gradients are reduced in the shard group, and then over the replicate
  // group (hybrid sharding).
  bool replicated = false;
  // The shard group of a replicated unit has several ranks, so that an
  // all-reduce has a reduce-scatter to wait for.
  bool sharded = true;
  // Ranks compute with parameters in each other's memory. Shards may then be
  // written only while no rank reads them; see Schedule.
  bool shares_memory = false;
  // Its shards have to be read before they can be gathered (offload).
  bool rests_elsewhere = false;
};

struct ScheduleOptions {
  // While a unit computes, starts the gather of the unit that followed it in
  // the previous forward.
  bool forward_prefetch = true;
  // Does so in backward, in the reverse of this iteration's forward order.
  bool backward_prefetch = true;
  // The limits of prefetching and of reductions in flight. With the defaults
  // the root, two units and two reduce buffers are alive at most.
  int max_gathered_units = 2;
  int max_reduce_buffers = 2;  // at least 1
  // How many of the next units are read ahead, if they rest off the device.
  int load_distance = 2;
  // Asks for kStep as soon as a unit's gradients are complete.
  bool step_in_backward = false;
};

enum class EventKind {
  kPreForward,     // the unit is about to compute
  kPostForward,    // it has computed; expects_backward: its output needs grad
  kPreBackward,    // the gradient has reached its output
  kPostBackward,   // it has all its gradients; reduces: some are trainable
  kEndOfBackward,  // the outermost backward is over; no unit
  kReset,          // the iteration is given up after an error; no unit
  kUnshard,        // the user wants the unit gathered ahead of its use
  kWaitUnshard,    // the user waits until it is gathered
  kReshard,        // the user wants the unit freed
  // These two come outside forward and backward.
  kSetReduction,  // the user chooses the reductions of the unit's backwards
  kRelease,       // shards are about to be read or written whole; no unit
};

struct Event {
  EventKind kind;
  int unit = 0;
  bool records_graph = false;     // kPreForward: grad mode is on
  bool recomputes = false;        // kPreForward, kPostForward: inside backward
  bool expects_backward = false;  // kPostForward
  bool reduces = false;           // kPostBackward
  // kPostBackward, kEndOfBackward: this backward reduces gradients, and does
  // not keep them whole for a later one. kSetReduction: such backwards reduce
  // the unit's gradients.
  bool synchronizes = true;
  // kSetReduction: sums of a replicated unit are all-reduced over the replicate
  // group, and not kept for a later backward.
  bool all_reduces = true;
};

enum class ActionKind {
  kLoad,        // start to read the shard (a hint), to gather it soon
  kGather,      // start the all-gather into unsharded memory
  kGatherCopy,  // gather the present values into memory that no other rank
                // writes, so that shards may be written at once
  kWaitGather,  // finish it; the module's tensors look into that memory
  kFree,        // give the unsharded memory back
  kShrink,      // give it back, but keep the part for the smaller group
  kDropPart,    // give that part back; later gathers read shards
  kAccumulate,  // add the gradients to those kept whole
  kFillReduceBuffer,  // copy the gradients to the reduce buffer, or add them to
                      // those kept whole, which are there already
  kReduce,            // start the reduce-scatter
  kReplicate,         // finish it, add kept sums, and start the all-reduce over
                      // the replicate group
  kKeepSums,          // finish it and add to the sums kept for an all-reduce
  kReplicateSums,     // start the all-reduce of the sums that are kept
  kWaitReduce,        // finish the reduction; add into the shard's gradient
  kStep,              // step the optimizer: the shard's gradient is complete
  kOpenShards,        // wait until no rank writes shards, so that all may read
  kCloseShards,       // wait until no rank reads shards, so that all may write
};

struct Action {
  ActionKind kind;
  int unit;

  friend bool operator==(const Action& a, const Action& b) {
    return a.kind == b.kind && a.unit == b.unit;
  }
};
using Actions = absl::InlinedVector<Action, 8>;

const char* Name(EventKind kind);
const char* Name(ActionKind kind);
std::string ToString(const Event& event);
std::string ToString(const Action& action);

// Records the order in which units run, and predicts the next ones. It expects
// a forward to go like the forward before, and a backward like this iteration's
// forward in reverse. A unit may run several times.
class UnitOrder {
 public:
  static constexpr int kNone = -1;

  // These enclose an outermost forward.
  void BeginForward() {
    Forget();
    forward_cursor_ = 0;
  }
  void EndForward() { previous_forward_ = forward_; }
  void BeginBackward() { backward_cursor_ = post_forward_.size(); }
  // Forgets the iteration, but not the last complete forward.
  void Forget() {
    forward_.clear();
    post_forward_.clear();
  }

  // Returns whether a unit of the last forward expects a backward.
  bool expects_backward() const { return !post_forward_.empty(); }

  void AddForward(int unit) { forward_.push_back(unit); }
  // Adds a unit that has computed and expects a backward.
  void AddExpectedBackward(int unit) { post_forward_.push_back(unit); }

  // Notes that `unit` runs, and returns the next one; kNone if `unit` was not
  // expected or is the last.
  int NextInForward(int unit);
  int NextInBackward(int unit);

  // Returns unit `i`, from 0, of those to come; kNone if there are fewer.
  int ToComeInForward(size_t i) const;
  int ToComeInBackward(size_t i) const;

 private:
  std::vector<int> forward_;           // this forward, by kPreForward
  std::vector<int> previous_forward_;  // the last complete forward
  size_t forward_cursor_ = 0;          // index in it of the first to come
  std::vector<int> post_forward_;      // units that expect a backward
  size_t backward_cursor_ = 0;         // entries before it are to come
};

// The state machine of one sharded model on one rank. Ranks that report the
// same events get the same actions. Not thread-safe.
//
// These rules hold if ranks share memory:
//   - Shards are written outside forward and backward, and in backward by
//     kStep. Shards of other ranks are read from kGather until the unit is
//     freed, which is inside a forward or a backward, or between the two.
//   - Every outermost forward begins with kOpenShards, whatever is gathered
//     already, and ends with kCloseShards. A backward reads the same values as
//     its forward, which nobody has written since, so it opens nothing.
//   - When a reduction is finished, every rank has started it. Nobody reads a
//     unit that was freed before its reduction, so kStep may write it. A
//     backward that has read other units ends with kCloseShards.
//   - A unit that the user gathers outside forward and backward outlives both
//     fences. So it is a copy (kGatherCopy), with the same values for every
//     backend. A forward with grad can use it only if nobody has written the
//     shards since, because backward gathers them anew.
class Schedule {
 public:
  // `units` are in pre-order: parents before children, the root first.
  Schedule(std::vector<ScheduledUnit> units, ScheduleOptions options);

  // Returns the actions that `event` asks for. FailedPrecondition, with nothing
  // changed: a unit inside the model runs forward with grad outside a forward
  // of the root; a forward ends that is not the innermost one under way; a
  // backward enters or recomputes a unit, or has its gradients, that was
  // stepped since its forward; a backward inside a forward has gradients to
  // step; kReshard of a unit that computes.
  absl::StatusOr<Actions> Next(const Event& event);

  const std::vector<ScheduledUnit>& units() const { return units_; }
  const ScheduleOptions& options() const { return options_; }
  // Sets whether a backward still has to reduce gradients of `unit` that
  // kAccumulate has kept, or sums of kKeepSums. kReset does not change this.
  void SetKept(int unit, bool whole_gradients, bool sums) {
    states_[unit].has_whole_gradients = whole_gradients;
    states_[unit].has_sums = sums;
  }
  // Return what the last kSetReduction has set.
  bool synchronizes(int unit) const { return states_[unit].synchronizes; }
  bool all_reduces(int unit) const { return states_[unit].all_reduces; }
  // Call it between iterations.
  void set_step_in_backward(bool step) { options_.step_in_backward = step; }

  bool in_forward() const { return !forward_stack_.empty(); }
  bool in_backward() const { return in_backward_; }
  // Returns whether the unit is gathered or being gathered.
  bool IsUnsharded(int unit) const {
    return states_[unit].gather != Gather::kSharded;
  }
  // Returns whether the unit stays gathered from a backward that did not
  // synchronize to the one that does.
  bool IsKept(int unit) const { return states_[unit].kept; }
  // Returns whether a copy of the unit is held for the user until its next
  // forward.
  bool IsHeldForUser(int unit) const {
    return states_[unit].requested && states_[unit].is_copy;
  }
  // Returns whether `unit` is inside `ancestor`, and is not `ancestor`.
  bool IsAncestor(int ancestor, int unit) const;
  int num_reductions_in_flight() const {
    return static_cast<int>(reductions_.size());
  }

 private:
  enum class Gather { kSharded, kInFlight, kGathered };
  struct State {
    Gather gather = Gather::kSharded;
    bool is_copy = false;       // gathered by kGatherCopy
    bool requested = false;     // kUnshard has come, and no use since
    bool is_read = false;       // read in common memory since the last fence
    bool loading = false;       // kLoad has come, kGather has not
    bool kept = false;          // gathered over an unsynchronised backward
    bool has_part = false;      // kShrink has kept a part
    int forwards = 0;           // under way
    int backwards = 0;          // under way
    int backwards_to_come = 0;  // at most, of forwards since a backward ended
    int of_last_forward = 0;    // among them, of the last outermost forward
    bool has_whole_gradients = false;  // kept by kAccumulate
    bool has_sums = false;             // kept by kKeepSums
    bool synchronizes = true;          // set by kSetReduction
    bool all_reduces = true;           // likewise
    bool step_due = false;             // reduced, but kStep has not come
    bool stepped = false;              // since its last forward

    bool running() const { return forwards + backwards > 0; }
  };
  struct Reduction {
    int unit;
    bool replicating;  // kReplicate has come or is not needed
    bool keeps_sums;   // it ends by kKeepSums
  };

  absl::Status CheckPreForward(const Event& event) const;
  absl::Status CheckPostForward(const Event& event) const;
  absl::Status CheckBackward(const Event& event) const;
  void PreForward(const Event& event, Actions& actions);
  void PostForward(const Event& event, Actions& actions);
  void PreBackward(int unit, Actions& actions);
  void PostBackward(const Event& event, Actions& actions);
  void EndOfBackward(const Event& event, Actions& actions);
  void Reset(Actions& actions);

  void BeginIteration(Actions& actions);
  void EnterBackward();
  void StartGather(int unit, Actions& actions,
                   ActionKind how = ActionKind::kGather);
  void GatherForUser(int unit, Actions& actions);
  void PassFence(ActionKind fence, Actions& actions);
  void EnsureGathered(int unit, Actions& actions);
  void Prefetch(int unit, int running_unit, Actions& actions);
  void LoadAhead(bool forward, Actions& actions);
  void Free(int unit, Actions& actions, ActionKind how = ActionKind::kFree);
  void FreeUnless(bool (*keep)(const State&), Actions& actions);
  void FreeWrongGuess(int needed_unit, Actions& actions);
  void DropParts(Actions& actions);
  void MakeRoomForReduction(Actions& actions);
  void StartReduction(int unit, Actions& actions);
  void Replicate(Reduction& reduction, Actions& actions);
  void ReplicateSums(Actions& actions);
  void FinishReduction(Actions& actions);
  void Step(int unit, Actions& actions);

  const std::vector<ScheduledUnit> units_;
  ScheduleOptions options_;
  std::vector<State> states_;
  UnitOrder order_;
  std::vector<int> forward_stack_;
  bool in_backward_ = false;
  bool backward_has_ended_ = false;   // since the last outermost forward began
  std::deque<Reduction> reductions_;  // in flight, oldest first
  std::vector<int> unsharded_;        // gathered or in flight, ascending
  int guess_ = -1;              // the unit that was prefetched and not used yet
  int num_parts_ = 0;           // units with has_part
  const bool shares_memory_;    // some unit does
  const bool rests_elsewhere_;  // some unit does
};

}  // namespace fsdp

#endif  // FSDP_SCHEDULE_SCHEDULE_H_
