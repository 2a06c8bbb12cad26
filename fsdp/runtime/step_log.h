// Logs of what steps have done with which memory, to tell whether they are
// alike (a captured step stands for all that follow), and of collectives.
#ifndef FSDP_RUNTIME_STEP_LOG_H_
#define FSDP_RUNTIME_STEP_LOG_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/schedule/schedule.h"

namespace fsdp {

// An action of the schedule that was carried out.
struct StepRecord {
  Action action;
  // Addresses for each flat parameter of the unit, afterwards; null for none.
  std::vector<const void*> gathered = {};
  std::vector<const void*> reduced = {};
  // The host has read from the device which parameters other ranks have used.
  bool read_flags = false;
};
using StepLog = std::vector<StepRecord>;

// Returns "" if both steps are alike and can be captured. Otherwise returns the
// first difference between `before` and the step after it, with names of units:
// "WaitGather of blocks.1: what is gathered lies elsewhere than in the step
// before".
std::string DifferenceOf(const StepLog& before, const StepLog& after,
                         const std::function<std::string(int unit)>& name);

// Keeps which collectives a rank has started, in order, for comparison between
// ranks.

class OrderLog {
 public:
  // `kind` is kGather, kReduce or kReplicate. `label` must outlive this object.
  void Add(ActionKind kind, int unit, const std::string& label, int64_t bytes,
           c10::ScalarType dtype);
  void Clear();

  // Is of all since Clear(). Equal orders have equal hashes on all ranks.
  uint64_t hash() const { return hash_; }
  // Returns a line with label, bytes and dtype for each; if there are very
  // many, as when only forwards run, for the first ones.
  std::string ToString() const;

 private:
  static constexpr size_t kKept = 10'000;
  static constexpr uint64_t kNothing = 0xcbf29ce484222325;

  struct Entry {
    ActionKind kind;
    const std::string* label;
    int64_t bytes;
    c10::ScalarType dtype;
  };

  uint64_t hash_ = kNothing;  // FNV-1a over words
  uint64_t count_ = 0;
  std::vector<Entry> first_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_STEP_LOG_H_
