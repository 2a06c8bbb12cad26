// The fixture of tests of a Runtime alone.
#ifndef FSDP_RUNTIME_TESTING_UNITS_H_
#define FSDP_RUNTIME_TESTING_UNITS_H_

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

// Two units, each with two parameters in float and one in double, which has a
// flat parameter of its own.
class Units {
 public:
  static constexpr int64_t kNumel = 11;
  static constexpr absl::Duration kTimeout = absl::Seconds(20);

  // Parameter c is computed in `dtype_of_c`.
  Units(Communicator& world, const Placement& placement,
        at::ScalarType dtype_of_c = at::kDouble,
        absl::Duration timeout = kTimeout) {
    std::vector<RuntimeUnit> units;
    for (const std::string name : {"first", "second"}) {
      RuntimeUnit& unit = units.emplace_back(EmptyUnit(name, placement));
      Add({"a", "b"}, at::kFloat, at::kFloat, world, unit);
      Add({"c"}, at::kDouble, dtype_of_c, world, unit);
    }
    runtime_ =
        std::make_unique<Runtime>(Unowned(world), std::move(units), timeout);
  }

  Runtime& runtime() { return *runtime_; }
  Reducer& reducer() { return runtime_->reducer(); }
  const flat_param::FlatParameter& flat(int unit, int i) const {
    return *runtime_->flats(unit)[i / 2];
  }
  at::Tensor Slice(int unit, int i) const {
    return flat(unit, i).ShardSlice(i % 2);
  }
  const at::Tensor& parameter(int unit, int i) const {
    return tensors_[3 * unit + i];
  }
  // Returns what the parameter is at first.
  static at::Tensor Values(int unit, int i) {
    return at::arange(kNumel, i < 2 ? at::kFloat : at::kDouble) +
           10 * (3 * unit + i);
  }
  void Train(int unit, int i, bool trained) const {
    Slice(unit, i).set_requires_grad(trained);
  }

  int rank() const { return runtime_->communicator().rank(); }

  // Executes actions with gradients of these values; 0 means none.
  void Do(const std::vector<ActionKind>& kinds, int unit, double a = 0,
          double b = 0, double c = 0) {
    EXPECT_OK(Try(kinds, unit, a, b, c));
  }
  // As Do(), which expects no error.
  absl::Status Try(const std::vector<ActionKind>& kinds, int unit, double a = 0,
                   double b = 0, double c = 0) {
    std::vector<at::Tensor> gradients;
    for (double value : {a, b, c}) {
      const auto dtype = gradients.size() < 2 ? at::kFloat : at::kDouble;
      gradients.push_back(value == 0 ? at::Tensor()
                                     : at::full({kNumel}, value, dtype));
    }
    return DoWith(kinds, unit, gradients);
  }
  absl::Status DoWith(const std::vector<ActionKind>& kinds, int unit,
                      const std::vector<at::Tensor>& gradients) {
    Actions actions;
    for (const ActionKind kind : kinds) actions.push_back({kind, unit});
    return runtime_->Execute(actions, gradients);
  }

  // Expects the gradient; 0 means that there is none.
  void ExpectGradient(int unit, int i, double expected) const {
    const at::Tensor gradient = Slice(unit, i).grad();
    ASSERT_EQ(gradient.defined(), expected != 0) << "gradient " << i;
    if (!gradient.defined()) return;
    EXPECT_TRUE(at::equal(gradient, at::full_like(gradient, expected)))
        << "gradient " << i << " is not " << expected;
  }
  void ExpectNothingInUse() const {
    const MemoryStats stats = runtime_->memory_stats();
    EXPECT_EQ(stats.parameters.in_use_bytes, 0);
    EXPECT_EQ(stats.gradients.in_use_bytes, 0);
  }

 private:
  void Add(const std::vector<std::string>& names, at::ScalarType dtype,
           at::ScalarType compute_dtype, Communicator& world,
           RuntimeUnit& unit) {
    std::vector<flat_param::NamedParameter> parameters;
    for (const std::string& name : names) {
      const int index = static_cast<int>(tensors_.size());
      tensors_.push_back(
          Values(index / 3, index % 3).to(dtype).requires_grad_());
      parameters.push_back({name, {tensors_.back()}});
    }
    AddFlat(std::move(parameters), compute_dtype, world, unit);
  }

  std::vector<at::Tensor> tensors_;  // unit after unit
  std::unique_ptr<Runtime> runtime_;
};

inline Placement Sharded(Communicator& world) {
  return {Unowned(world), {}, {}};
}

// Returns the groups of a mesh with two rows.
inline absl::StatusOr<Placement> Hybrid(Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(
      const Mesh mesh,
      Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", -1}}));
  return Placement{mesh.group(1), mesh.group(0), nullptr};
}

// Returns groups in which each rank is alone, and its replicas.
inline absl::StatusOr<Placement> NotSharded(Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> alone,
                        comm::SplitConsecutive(Unowned(world), 1));
  return Placement{std::move(alone), Unowned(world), nullptr};
}

// Calls `test` on each of `ranks` ranks with units of its own, which lie on the
// groups that `placement` returns.
inline void OnRanks(
    int ranks,
    const std::function<absl::StatusOr<Placement>(Communicator&)>& placement,
    const std::function<void(Units&)>& test) {
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement groups, placement(world));
    Units units(world, groups);
    test(units);
    return absl::OkStatus();
  }));
}

constexpr auto kGather = ActionKind::kGather;
constexpr auto kWaitGather = ActionKind::kWaitGather;
constexpr auto kFree = ActionKind::kFree;
constexpr auto kShrink = ActionKind::kShrink;
constexpr auto kFill = ActionKind::kFillReduceBuffer;
constexpr auto kReduce = ActionKind::kReduce;
constexpr auto kReplicate = ActionKind::kReplicate;
constexpr auto kWaitReduce = ActionKind::kWaitReduce;
constexpr auto kAccumulate = ActionKind::kAccumulate;
constexpr auto kStep = ActionKind::kStep;

}  // namespace fsdp::testing

#endif  // FSDP_RUNTIME_TESTING_UNITS_H_
