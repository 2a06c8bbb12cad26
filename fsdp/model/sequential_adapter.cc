#include "fsdp/model/sequential_adapter.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/module_forward.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/model/forward.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/recompute/checkpoint.h"

namespace fsdp {
namespace {

using ::torch::nn::AnyModule;
using ::torch::nn::AnyModulePlaceholder;
using ::torch::nn::AnyValue;

// Gives access to a private member: explicit instantiation ignores access
// rules, and the friend function returns the member pointer.
template <typename Tag,
          std::unique_ptr<AnyModulePlaceholder> AnyModule::*kMember>
struct MemberAccess {
  friend std::unique_ptr<AnyModulePlaceholder> AnyModule::*MemberOf(Tag) {
    return kMember;
  }
};
struct Content {
  friend std::unique_ptr<AnyModulePlaceholder> AnyModule::*MemberOf(Content);
};
template struct MemberAccess<Content, &AnyModule::content_>;

std::unique_ptr<AnyModulePlaceholder>& ContentOf(AnyModule& module) {
  return module.*MemberOf(Content());
}

// Has the layout of LibTorch's AnyModuleHolder<M, ...>, from which
// AnyModule::get<M>() takes the module: all shared pointers have one layout.
struct LaidOutAsHolder : AnyModulePlaceholder {
  explicit LaidOutAsHolder(const AnyModulePlaceholder& holder)
      : AnyModulePlaceholder(holder.type_info),
        module(static_cast<const LaidOutAsHolder&>(holder).module) {}
  const std::shared_ptr<void> module;
};

template <typename T>
bool AddTensorsOf(AnyValue& value, std::vector<at::Tensor*>& tensors) {
  T* const held = value.try_get<T>();
  if (held == nullptr) return false;
  for (at::Tensor* tensor : TensorsOf(*held)) tensors.push_back(tensor);
  return true;
}

// Returns whether the type of `value` is known.
bool AddTensors(AnyValue& value, std::vector<at::Tensor*>& tensors) {
  using at::Tensor;
  return AddTensorsOf<Tensor>(value, tensors) ||
         AddTensorsOf<std::vector<Tensor>>(value, tensors) ||
         AddTensorsOf<std::pair<Tensor, Tensor>>(value, tensors) ||
         AddTensorsOf<std::tuple<Tensor, Tensor>>(value, tensors) ||
         AddTensorsOf<std::tuple<Tensor, std::tuple<Tensor, Tensor>>>(value,
                                                                      tensors);
}

template <typename... Ts>
bool IsOneOf(AnyValue& value) {
  return ((value.try_get<Ts>() != nullptr) || ...);
}

AnyValue RunUnit(AnyModulePlaceholder& holder,
                 std::vector<AnyValue>&& arguments) {
  ForwardScope scope(*holder.ptr());
  if (!scope.is_unit()) return holder.forward(std::move(arguments));
  std::vector<at::Tensor*> inputs;
  for (AnyValue& argument : arguments) AddTensors(argument, inputs);
  if (scope.casts_inputs()) scope.CastInputs(inputs);
  if (scope.watches_inputs()) {
    for (const at::Tensor* input : inputs) scope.WatchInput(*input);
  }
  AnyValue output =
      scope.Run([&] { return holder.forward(std::move(arguments)); });
  std::vector<at::Tensor*> outputs;
  if (!AddTensors(output, outputs)) {
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "a unit in a Sequential, of type ",
        c10::demangle(holder.type_info.name()), ", returns ",
        c10::demangle(output.type_info().name()),
        ", in which no tensors are seen: run it by fsdp::Forward() from a "
        "module of yours")));
  }
  scope.Finish(outputs);
  return output;
}

// A unit gets or returns these, as ForEachTensor() sees them.
struct Values {
  std::vector<AnyValue> values;
};

template <typename Visit>
void VisitTensors(Values& values, Visit visit) {
  std::vector<at::Tensor*> tensors;
  for (AnyValue& value : values.values) AddTensors(value, tensors);
  for (at::Tensor* tensor : tensors) visit(*tensor);
}

AnyValue RunRecomputed(const RecomputedUnit& unit,
                       const std::shared_ptr<AnyModulePlaceholder>& holder,
                       std::vector<AnyValue>&& arguments) {
  for (AnyValue& argument : arguments) {
    std::vector<at::Tensor*> tensors;
    if (AddTensors(argument, tensors) ||
        IsOneOf<bool, int, int64_t, float, double>(argument)) {
      continue;
    }
    unit.Refuse(absl::StrCat("it takes ",
                             c10::demangle(argument.type_info().name()),
                             " in a Sequential, in which no tensors are seen: "
                             "run it by fsdp::Forward() from a module of "
                             "yours"));
  }
  const auto run = [holder](const Values& arguments) {
    return Values{{RunUnit(*holder, std::vector<AnyValue>(arguments.values))}};
  };
  Values output = checkpoint_internal::RunRegion(unit.options, unit.name, run,
                                                 Values{std::move(arguments)});
  return std::move(output.values.front());
}

// Replaces the holder of a child that is a unit in a Sequential's list.
class UnitCaller final : public LaidOutAsHolder {
 public:
  explicit UnitCaller(std::unique_ptr<AnyModulePlaceholder> holder)
      : LaidOutAsHolder(*holder), holder_(std::move(holder)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    if (const auto unit = FindRecomputed(*holder_->ptr())) {
      return RunRecomputed(*unit, holder_, std::move(arguments));
    }
    return RunUnit(*holder_, std::move(arguments));
  }
  std::shared_ptr<torch::nn::Module> ptr() override { return holder_->ptr(); }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<UnitCaller>(holder_->copy());
  }
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<at::Device> device) const override {
    return holder_->clone_module(device);
  }

 private:
  const std::shared_ptr<AnyModulePlaceholder> holder_;
};

void Adapt(AnyModule& child) {
  std::unique_ptr<AnyModulePlaceholder>& content = ContentOf(child);
  content = std::make_unique<UnitCaller>(std::move(content));
}

class Probe : public torch::nn::Module {
 public:
  int64_t forward(int64_t x) { return x + 1; }
};

}  // namespace

void AdaptSequential(torch::nn::SequentialImpl& sequential,
                     AdaptedUnits units) {
  for (AnyModule& child : sequential) {
    const std::optional<UnitHandle> unit = FindUnit(*child.ptr());
    if (!unit.has_value() ||
        dynamic_cast<UnitCaller*>(ContentOf(child).get()) != nullptr) {
      continue;
    }
    if (units == AdaptedUnits::kAll || unit->model->recomputes(unit->unit))
      Adapt(child);
  }
}

absl::Status CheckSequentialAdapter() {
  const auto probe = std::make_shared<Probe>();
  AnyModule any(probe);
  Adapt(any);
  bool same = false;
  const absl::Status status = TorchToStatus("self-check", [&] {
    same = &any.get<Probe>() == probe.get() && any.ptr() == probe &&
           any.forward<int64_t>(int64_t{1}) == 2;
  });
  if (status.ok() && same) return absl::OkStatus();
  return absl::InternalError(
      "this LibTorch's torch::nn::AnyModule is not the one this library was "
      "written for; build against LibTorch 2.11");
}

}  // namespace fsdp
