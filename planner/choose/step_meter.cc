#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/DimVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/strides.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/model/precision_switch.h"
#include "fsdp/setup/unit_plan.h"
#include "planner/choose/step_profile.h"

namespace fsdp {
namespace {

const void* StorageOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// Follows the operators of a step from module to module, and the memory that is
// allocated and freed. Thread-safe: a device's thread of autograd frees memory
// when backward has returned, and may be the last that holds the meter.
class StepMeter : public c10::MemoryReportingInfoBase {
 public:
  StepMeter(const ModuleTree& tree, c10::Device device) : device_(device) {
    for (const ParameterUse& use : tree.uses) {
      for (const at::Tensor& tensor : tree.parameters[use.parameter]) {
        module_of_.emplace(StorageOf(tensor), use.module);
      }
    }
  }
  ~StepMeter() override {
    // Comes behind what other threads have done.
    const absl::MutexLock lock(&mutex_);
  }

  void BeginForward() {
    const absl::MutexLock lock(&mutex_);
    forward_.emplace_back();  // for the root, module 0
    since_ = absl::Now();
  }
  void EndForward() {
    const absl::MutexLock lock(&mutex_);
    forward_.back().seconds = SpendUntilNow();
    for (const auto& [address, block] : alive_) {
      forward_[blocks_[block].visit].saved += blocks_[block].bytes;
    }
    at_ = forward_.size() - 1;
    events_of_forward_ = events_.size();
  }
  void EndBackward() {
    const absl::MutexLock lock(&mutex_);
    backward_seconds_ = SpendUntilNow();
  }

  // Takes note that `gradient` has become the gradient of a parameter.
  void OnGradient(const at::Tensor& gradient) {
    if (StorageOf(gradient) == nullptr) return;
    const absl::MutexLock lock(&mutex_);
    const auto found = alive_.find(gradient.storage().data());
    if (found != alive_.end()) blocks_[found->second].is_gradient = true;
  }

  StepProfile Profile() const {
    const absl::MutexLock lock(&mutex_);
    StepProfile profile{forward_, backward_seconds_};
    std::vector<int64_t> before = {0};  // bytes, by visit
    for (const ModuleVisit& visit : forward_) {
      before.push_back(before.back() + visit.saved);
    }
    int64_t live = 0;
    for (size_t i = 0; i < events_.size(); ++i) {
      const Block& block = blocks_[events_[i].block];
      if (!block.is_gradient) live += events_[i].sign * block.bytes;
      const size_t at = events_[i].visit;
      ModuleVisit& visit = profile.forward[at];
      if (i < events_of_forward_) {
        visit.working = std::max(visit.working, live - before[at]);
      } else {
        visit.backward_working =
            std::max(visit.backward_working, live - before[at + 1]);
      }
    }
    return profile;
  }

  void OnOperator(c10::ArrayRef<const c10::IValue> inputs) {
    const absl::MutexLock lock(&mutex_);
    tensors_.clear();
    for (const c10::IValue& input : inputs) {
      if (input.isTensor()) tensors_.push_back(&input.toTensor());
      if (!input.isTensorList()) continue;
      for (const c10::IValue& element : input.toListRef()) {
        tensors_.push_back(&element.toTensor());
      }
    }
    int64_t others = 0;
    int module = -1;
    for (const at::Tensor* tensor : tensors_) {
      const auto found = module_of_.find(StorageOf(*tensor));
      if (found != module_of_.end()) {
        module = found->second;
      } else if (tensor->defined() && tensor->is_floating_point()) {
        others += static_cast<int64_t>(tensor->nbytes());
      }
    }
    const bool is_forward = events_of_forward_ == 0;
    if (module >= 0 && module != forward_[at_].module) {
      is_forward ? Enter(module) : GoBackTo(module);
    }
    // Earlier operators of the visit may have read parameters alone.
    if (is_forward && forward_[at_].input == 0) forward_[at_].input = others;
  }

  void reportMemoryUsage(void* address, int64_t bytes, size_t, size_t,
                         c10::Device) override {
    const absl::MutexLock lock(&mutex_);
    if (bytes > 0) {
      alive_[address] = blocks_.size();
      events_.push_back({blocks_.size(), at_, 1});
      blocks_.push_back({bytes, at_, false});
      return;
    }
    const auto found = alive_.find(address);
    if (found == alive_.end()) return;  // allocated before this step
    events_.push_back({found->second, at_, -1});
    alive_.erase(found);
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  struct Block {
    int64_t bytes;
    size_t visit;
    bool is_gradient;
  };
  struct Event {
    size_t block;
    size_t visit;
    int sign;  // 1: allocated, -1: freed
  };

  void Enter(int module) {
    forward_.back().seconds = SpendUntilNow();
    at_ = forward_.size();
    forward_.emplace_back().module = module;
  }

  // Moves to the last visit of `module` whose backward is still to come.
  void GoBackTo(int module) {
    for (size_t i = at_ + 1; i-- > 0;) {
      if (forward_[i].module != module) continue;
      at_ = i;
      return;
    }
  }

  // Returns the seconds since the last call.
  double SpendUntilNow() {
    Synchronize(device_);
    const absl::Time begin = since_;
    since_ = absl::Now();
    return absl::ToDoubleSeconds(since_ - begin);
  }

  const c10::Device device_;
  mutable absl::Mutex mutex_;                       // guards all that follows
  std::unordered_map<const void*, int> module_of_;  // by storage
  std::vector<ModuleVisit> forward_;
  size_t at_ = 0;  // the visit that computes, or whose backward does
  absl::Time since_;
  double backward_seconds_ = 0;
  std::vector<Block> blocks_;
  std::unordered_map<const void*, size_t> alive_;  // blocks, by address
  std::vector<Event> events_;
  size_t events_of_forward_ = 0;
  std::vector<const at::Tensor*> tensors_;  // of the operator
};

std::unique_ptr<at::ObserverContext> OnStart(
    const at::RecordFunction& function) {
  // The callback is a plain function, so that it finds the meter by its other
  // role, that of counting memory.
  auto* const meter = dynamic_cast<StepMeter*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  if (meter == nullptr) return nullptr;
  c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  // The inputs of an operator called through the stack are the whole stack.
  const size_t count = function.num_inputs();
  if (count < inputs.size()) inputs = inputs.slice(inputs.size() - count);
  meter->OnOperator(inputs);
  return nullptr;
}

// While an object is alive, the meter is told what operators this thread runs.
class Observation {
 public:
  Observation()
      : callback_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&OnStart).needsInputs(true).scopes(
                {at::RecordScope::FUNCTION}))) {}
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;
  ~Observation() { at::removeCallback(callback_); }

 private:
  const at::CallbackHandle callback_;
};

// Makes zeros that need no memory until somebody writes: reading gives the
// system's one page of zeros.
at::Tensor UntouchedZeros(const at::Tensor& like, c10::ScalarType dtype) {
  const auto options = like.options().dtype(dtype).requires_grad(false);
  const int64_t bytes =
      like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0) {
    return at::empty_strided(like.sizes(), like.strides(), options);
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw StatusError(absl::ErrnoToStatus(
        errno, absl::StrCat("addresses for ", bytes, " bytes of zeros")));
  }
  return at::from_blob(
      memory, like.sizes(), like.strides(),
      [bytes](void* address) { munmap(address, bytes); }, options);
}

// While one lives, the model's parameters and buffers that are deferred, or
// computed in another dtype than they are stored in, are zeros of the dtype in
// which they are computed. On the CPU these zeros are pages that nothing has
// written, which take no memory; elsewhere those of parameters, which the model
// does not write, lie in the memory of the largest. Afterwards all is as it
// was, including buffers that the model has written. Throws what LibTorch
// throws.
class StandIns {
 public:
  explicit StandIns(const ShardPlan& plan) {
    try {
      ReplaceAll(plan);
    } catch (...) {
      Restore();
      throw;
    }
  }
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;
  ~StandIns() { Restore(); }

 private:
  struct Kept {
    at::Tensor tensor;
    at::Tensor original;  // the original, or a copy of a buffer's values
    bool is_copy;
  };

  // Makes zeros in `zeros`, which is made larger as needed, or in untouched
  // pages. A storage of its own tells whose they are.
  static at::Tensor ZerosLike(const at::Tensor& like, c10::ScalarType dtype,
                              at::Tensor& zeros) {
    const bool is_dense = like.is_non_overlapping_and_dense();
    if (like.is_cpu() && is_dense) return UntouchedZeros(like, dtype);
    const auto bytes = static_cast<size_t>(like.numel()) * elementSize(dtype);
    if (!zeros.defined() || zeros.nbytes() < bytes) {
      zeros = at::zeros({static_cast<int64_t>(bytes)},
                        like.options().dtype(at::kByte).requires_grad(false));
    }
    const c10::Storage storage(
        c10::Storage::use_byte_size_t(), bytes,
        c10::DataPtr(
            zeros.mutable_data_ptr(), new at::Tensor(zeros),
            [](void* held) { delete static_cast<at::Tensor*>(held); },
            zeros.device()));
    const c10::DimVector rows = c10::contiguous_strides(like.sizes());
    return TensorOver(storage, /*offset=*/0, like.sizes(),
                      is_dense ? like.strides() : c10::IntArrayRef(rows),
                      dtype);
  }

  void ReplaceAll(const ShardPlan& plan) {
    using Tied = std::vector<at::Tensor>;
    std::multimap<size_t, std::pair<const Tied*, c10::ScalarType>> by_bytes;
    for (const PlannedUnit& planned : plan.units) {
      for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
        const int parameter = planned.unit.parameters[i].parameter;
        const Tied& tied = plan.tree.parameters[parameter];
        const c10::ScalarType dtype = planned.compute_dtypes[i];
        if (!IsDeferred(tied.front()) && tied.front().scalar_type() == dtype) {
          continue;
        }
        const size_t bytes = tied.front().numel() * elementSize(dtype);
        by_bytes.insert({bytes, {&tied, dtype}});
      }
    }
    at::Tensor largest;
    for (auto it = by_bytes.rbegin(); it != by_bytes.rend(); ++it) {
      const auto& [tied, dtype] = it->second;
      const at::Tensor zeros = ZerosLike(tied->front(), dtype, largest);
      for (const at::Tensor& tensor : *tied) Replace(tensor, zeros);
    }
    const c10::NoGradGuard no_grad;
    for (const CastBuffer& buffer : plan.buffers) {
      if (IsDeferred(buffer.tensor) || buffer.wanted != buffer.original) {
        at::Tensor own;  // the model writes buffers
        Replace(buffer.tensor, ZerosLike(buffer.tensor, buffer.wanted, own));
      } else {
        kept_.push_back({buffer.tensor, buffer.tensor.clone(), true});
      }
    }
  }

  // Keeps the tensor object, to which modules and graphs refer.
  void Replace(const at::Tensor& tensor, const at::Tensor& zeros) {
    kept_.push_back({tensor, tensor.variable_data(), false});
    tensor.unsafeGetTensorImpl()->shallow_copy_from(zeros.getIntrusivePtr());
  }

  void Restore() {
    const c10::NoGradGuard no_grad;
    for (const Kept& kept : kept_) {
      if (kept.is_copy) {
        kept.tensor.copy_(kept.original);
      } else {
        kept.tensor.unsafeGetTensorImpl()->shallow_copy_from(
            kept.original.getIntrusivePtr());
      }
    }
  }

  std::vector<Kept> kept_;
};

class DropGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit DropGradient(StepMeter& meter) : meter_(meter) {}

  void operator()(const at::Tensor& parameter) override {
    meter_.OnGradient(parameter.grad());
    parameter.mutable_grad().reset();
  }

 private:
  StepMeter& meter_;
};

// While one lives, each gradient of the model's parameters vanishes as soon as
// the meter has seen it. Afterwards parameters have their former gradients.
class VanishingGradients {
 public:
  VanishingGradients(const ShardPlan& plan, StepMeter& meter) {
    for (const auto& tied : plan.tree.parameters) {
      for (const at::Tensor& tensor : tied) {
        if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
        auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor);
        kept_.push_back({tensor, tensor.grad(), std::move(hook)});
        tensor.mutable_grad().reset();
        hook = std::make_unique<DropGradient>(meter);
      }
    }
  }
  VanishingGradients(const VanishingGradients&) = delete;
  VanishingGradients& operator=(const VanishingGradients&) = delete;
  ~VanishingGradients() {
    for (Kept& kept : kept_) {
      torch::autograd::impl::post_acc_grad_hooks(kept.parameter) =
          std::move(kept.hook);
      kept.parameter.mutable_grad() = kept.gradient;
    }
  }

 private:
  struct Kept {
    at::Tensor parameter;
    at::Tensor gradient;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook;
  };
  std::vector<Kept> kept_;
};

using Loss = std::function<at::Tensor(int64_t)>;

absl::StatusOr<StepProfile> RunStep(const ShardPlan& plan, const Loss& loss,
                                    int64_t rows) {
  const auto meter = std::make_shared<StepMeter>(
      plan.tree, plan.tree.parameters.front().front().device());
  const c10::DebugInfoGuard metered(c10::DebugInfoKind::PROFILER_STATE, meter);
  const VanishingGradients gradients(plan, *meter);
  const at::AutoGradMode with_grad(true);
  const Observation observation;
  meter->BeginForward();
  const at::Tensor result = loss(rows);
  meter->EndForward();
  if (!result.defined() || result.numel() != 1 || !result.requires_grad()) {
    return absl::InvalidArgumentError(
        "AutoOptions::loss has returned no tensor of one element that requires "
        "grad: let it return the loss of a forward of the module");
  }
  result.backward();
  meter->EndBackward();
  return meter->Profile();
}

// Returns the faster one of two steps, after one that warms up.
absl::StatusOr<StepProfile> RunSteps(const ShardPlan& plan, const Loss& loss,
                                     int64_t rows) {
  FSDP_RETURN_IF_ERROR(RunStep(plan, loss, rows).status());
  FSDP_ASSIGN_OR_RETURN(StepProfile first, RunStep(plan, loss, rows));
  FSDP_ASSIGN_OR_RETURN(StepProfile second, RunStep(plan, loss, rows));
  const auto seconds = [](const StepProfile& profile) {
    return profile.forward_seconds() + profile.backward_seconds;
  };
  return seconds(second) < seconds(first) ? second : first;
}

// Returns the most bytes of activations that are alive at a time.
int64_t MostAlive(const StepProfile& profile) {
  int64_t saved = 0;
  int64_t most = 0;
  for (const ModuleVisit& visit : profile.forward) {
    most = std::max(most, saved + visit.working);
    saved += visit.saved;
    most = std::max(most, saved + visit.backward_working);
  }
  return most;
}

absl::StatusOr<StepProfile> MeasureRows(const ShardPlan& plan, const Loss& loss,
                                        int64_t rows, int64_t memory_bytes) {
  FSDP_ASSIGN_OR_RETURN(const StepProfile one, RunSteps(plan, loss, 1));
  if (rows == 1) return one;
  FSDP_ASSIGN_OR_RETURN(const StepProfile two, RunSteps(plan, loss, 2));
  if (rows == 2) return two;
  const StepProfile all = Extrapolate(one, two, rows);
  if (MostAlive(all) > memory_bytes) return all;
  return RunSteps(plan, loss, rows);
}

}  // namespace

absl::StatusOr<StepProfile> MeasureStep(const ShardPlan& plan, const Loss& loss,
                                        int64_t rows, int64_t memory_bytes) {
  absl::StatusOr<StepProfile> result = absl::UnknownError("nothing has run");
  const absl::Status thrown =
      TorchToStatus("running the model as AutoOptions::loss says", [&] {
        const SeedGuard seeded(0);
        const StandIns stand_ins(plan);
        result = MeasureRows(plan, loss, rows, memory_bytes);
      });
  if (!thrown.ok()) return thrown;
  return result;
}

}  // namespace fsdp
