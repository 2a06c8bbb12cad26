// What a sharded model remembers of one backward, from its first event until it
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

// One for all backwards of a model, of which one at a time is under way;
// backwards nested in it are a part of it. Decides nothing about units. Used by
// the thread that reports the events.
class BackwardSession {
 public:
  explicit BackwardSession(int num_units) : hooks_have_run_(num_units) {}

  // Whether a backward has begun here and the engine still runs it.
  bool is_under_way() const { return !under_way_.expired(); }
  // At the first event of an outermost backward. `on_end` is called by the
  // engine when that is over; what it throws ends the backward. Otherwise
  // `on_lost` is called: when `on_end` has thrown, and when the engine drops a
  // backward that threw, where it may do so on a thread of its own. What that
  // throws is ignored. Both may be called when this object is gone.
  void Begin(std::function<void()> on_end, std::function<void()> on_lost);
  // First in `on_end`: nothing is under way any more.
  void Leave() { under_way_.reset(); }
  // At the end, and when the backward is given up.
  void Forget();

  // --- Units that are reached and not left ---------------------------------
  // The gradient has reached the outputs of a forward of `unit` that began at
  // `start_sequence` of autograd.
  void AddPending(int unit, uint64_t start_sequence, bool has_unit_node);
  // It has come to the unit's own node.
  void RemovePending(int unit, uint64_t start_sequence);
  struct Finished {
    int unit;
    bool reduces;  // other ranks may have gradients of it
  };
  // The innermost pending unit whose forward began at `sequence` or later, of
  // the backward that runs now or of one nested in it, which is over. It is
  // pending no more. Null when there is none.
  std::optional<Finished> TakePendingFrom(uint64_t sequence);

  // FailedPrecondition, naming `unit`, when what the backward that runs now
  // goes through was recorded on another thread than `thread`: sequence
  // numbers, by which autograd and this object order nodes, count per thread.
  absl::Status CheckForwardThread(const std::string& unit,
                                  std::optional<uint64_t> thread);

  // Whether the user's hooks on a parameter of a unit have run already.
  bool hooks_have_run(int unit, size_t parameter) const;
  void NoteHooks(int unit, size_t parameter);

 private:
  // A unit whose outputs the gradient has reached and whose own has not.
  struct Pending {
    int unit;
    int graph_task;  // of a nested backward higher than of the one around it
    uint64_t start_sequence;
    bool has_unit_node;
  };

  // Lives as long as the outermost backward under way, however that ends.
  struct UnderWay;
  std::weak_ptr<UnderWay> under_way_;
  std::vector<Pending> pending_;
  // On which thread what each backward under way goes through was recorded.
  std::map<int, uint64_t> forward_threads_;
  std::vector<std::vector<bool>> hooks_have_run_;  // by unit and parameter
};

}  // namespace fsdp

#endif  // FSDP_MODEL_BACKWARD_SESSION_H_
