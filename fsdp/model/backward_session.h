// The state of one backward of a sharded model, from its first event until it
// is over, has failed or is given up.
#ifndef FSDP_MODEL_BACKWARD_SESSION_H_
#define FSDP_MODEL_BACKWARD_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// Serves all backwards of a model, of which one at a time is under way;
// backwards nested in it are a part of it. It decides nothing about units. Used
// by the thread that reports the events.
class BackwardSession {
 public:
  explicit BackwardSession(int num_units) : hooks_have_run_(num_units) {}

  // Returns whether a backward has begun here and the engine still runs it.
  bool is_under_way() const { return !under_way_.expired(); }
  // Call it at the first event of an outermost backward. The engine calls
  // `on_end` when that is over; what it throws ends the backward. Instead it
  // calls `on_lost`, ignoring what that throws, if `on_end` has thrown or if it
  // drops a backward that threw, perhaps on its own thread. Both may be called
  // after this object is gone.
  void Begin(std::function<void()> on_end, std::function<void()> on_lost);
  // Call it first in `on_end`: no backward is under way any more.
  void Leave() { under_way_.reset(); }
  // Call it at the end, and when the backward is given up.
  void Forget();

  // --- Units that are reached and not left ---------------------------------
  // Notes that the gradient has reached the outputs of a forward of `unit`,
  // which began at `start_sequence` of autograd.
  void AddPending(int unit, uint64_t start_sequence, bool has_unit_node);
  // Notes that the gradient has reached the unit's own node.
  void RemovePending(int unit, uint64_t start_sequence);
  struct Finished {
    int unit;
    bool reduces;  // other ranks may have gradients of it
  };
  // Removes and returns the innermost pending unit whose forward began at
  // `sequence` or later, of the running backward or of one nested in it that is
  // over. Null if there is none.
  std::optional<Finished> TakePendingFrom(uint64_t sequence);

  // FailedPrecondition names `unit`: the running backward's forwards were
  // recorded on another thread than `thread`. Autograd and this object order
  // nodes by sequence numbers, which count per thread.
  absl::Status CheckForwardThread(const std::string& unit,
                                  std::optional<uint64_t> thread);

  // Returns whether the user's hooks on a parameter of a unit have run.
  bool hooks_have_run(int unit, size_t parameter) const;
  void NoteHooks(int unit, size_t parameter);

 private:
  // A unit whose outputs the gradient has reached, but not its own node.
  struct Pending {
    int unit;
    int graph_task;  // a nested backward's is higher than the one's around it
    uint64_t start_sequence;
    bool has_unit_node;
  };

  // Lives as long as the outermost backward under way, however that ends.
  struct UnderWay;
  std::weak_ptr<UnderWay> under_way_;
  std::vector<Pending> pending_;
  // The thread that recorded the forwards of each backward that is under way.
  std::map<int, uint64_t> forward_threads_;
  std::vector<std::vector<bool>> hooks_have_run_;  // by unit and parameter
};

}  // namespace fsdp

#endif  // FSDP_MODEL_BACKWARD_SESSION_H_
