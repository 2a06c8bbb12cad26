// Loads the states of an optimizer from the files of a checkpoint.
#ifndef CHECKPOINT_LOAD_OPTIMIZER_LOADER_H_
#define CHECKPOINT_LOAD_OPTIMIZER_LOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/state/optimizer_values.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// States are cast to the dtype of their parameter if both are floating-point.
// States that exist already with the same layout and dtype are filled in place.
// Others are made, filled and given to the optimizer a few at a time, so that
// the states that they replace, and the memory into which resting ones are
// read, never exist for all of them at once.
class OptimizerLoader {
 public:
  // All outlive it. `values` has the states of `optimizer`, which this takes
  // over.
  OptimizerLoader(RunValues& values, torch::optim::Optimizer& optimizer)
      : values_(values), optimizer_(optimizer) {}

  // Returns the catalog of the files of a slot, such as "exp_avg".
  using ReadSlot =
      absl::FunctionRef<absl::StatusOr<Catalog>(const std::string& name)>;
  // Changes and allocates nothing. Renames the parameters in `record` as the
  // model has them. InvalidArgument lists all that does not fit, for one slot.
  absl::Status Plan(ReadSlot read_slot, TrainingRecord& record, bool strict);

  // The catalogs of the slots, valid as long as this lives; after Plan().
  std::vector<const Catalog*> Catalogs() const;
  // The bytes that Fill() reads.
  int64_t bytes() const;

  // Reads from the files of Catalogs()[catalog].
  using Read =
      absl::FunctionRef<absl::Status(size_t catalog, const LoadPlan& plan,
                                     absl::Span<const TensorRange> targets)>;
  // Call it once. After an error the optimizer is partly filled.
  absl::Status Fill(Read read);

 private:
  // The files of one slot, and what they fill.
  struct Slot {
    std::string name;
    Catalog catalog;
    std::vector<TensorRange> targets;
    std::vector<LoadPlan> parts;  // one per target
  };
  // A target of a slot.
  struct Place {
    size_t slot;
    size_t target;
  };

  void UseFirstNames(TrainingRecord& record) const;
  const StoredTensor* FindState(const Catalog& catalog,
                                const std::string& parameter) const;
  absl::Status PlanSlot(const std::string& name, Catalog catalog, bool strict);
  absl::StatusOr<TensorRange> StateFor(const TensorRange& leaf,
                                       const std::string& slot,
                                       c10::ScalarType dtype);
  absl::Span<const TensorRange> parameters() const {
    return values_.model().parameters();
  }
  void KeepStepped();
  TensorRange& TargetAt(Place place) {
    return slots_[place.slot].targets[place.target];
  }
  // Returns those whose state is still to be made, or the others.
  std::vector<Place> PlacesOf(absl::Span<const int> leaves, bool is_new);
  // Bytes of a leaf's new states that exist beside old ones, or for a while.
  int64_t PassingBytes(int leaf);
  absl::Status ReadPlaces(absl::Span<const Place> places, Read read);
  absl::Status FillBatch(absl::Span<const int> leaves, Read read);

  RunValues& values_;
  torch::optim::Optimizer& optimizer_;
  std::vector<Slot> slots_;
  std::map<std::string, OptimizerSlots> present_;  // by parameter, as states_
  // New states. Tensors that are still to be made are on c10::kMeta.
  std::map<std::string, OptimizerSlots> states_;
  std::set<std::pair<const void*, int64_t>> taken_;  // memory of states_
  OptimizerReplacement replacement_;
  std::vector<int> leaves_;  // that get a state
  std::vector<std::vector<Place>> places_by_leaf_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_OPTIMIZER_LOADER_H_
