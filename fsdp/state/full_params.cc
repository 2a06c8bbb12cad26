#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/whole_model.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::Slice;

constexpr int kWriter = 0;  // the rank that rank0_only means

// Lends whole values to a caller until End(). After that the tensor and its
// views hold no memory, and raise an error that says what has ended. Not
// thread-safe.
class LentValues {
 public:
  // `values` is 1-D and contiguous and outlives End(). `until` names what ends:
  // "the scope of SummonFullParams()".
  LentValues(const at::Tensor& values, const std::string& until)
      : storage_(
            static_cast<int64_t>(values.nbytes()), values.device(),
            absl::StrCat("these are parameters or gradients of a sharded "
                         "model as they were whole, and ",
                         until, " is over: clone what has to outlive it")) {
    const NormalMode normal;
    storage_.Fill(values.mutable_data_ptr());
    tensor_ = TensorOver(storage_.storage(), 0, {values.numel()}, {1},
                         values.scalar_type());
  }

  // Has the same elements as `values`.
  const at::Tensor& tensor() const { return tensor_; }
  void End() { storage_.Empty(); }

 private:
  flat_param::GuardedStorage storage_;
  at::Tensor tensor_;
};

// What a caller has put in the place of a full parameter or its gradient, as
// torch::load(), set_data() and zero_grad() do.
struct Replaced {
  at::Tensor own;     // where the scope has its value
  at::Tensor values;  // undefined: zeros
};

// Adds `now`, which the caller has in the place of `own`, if it is not `own`.
absl::Status AddReplaced(const std::string& name, const at::Tensor& now,
                         const at::Tensor& own,
                         std::vector<Replaced>* replaced) {
  if (!now.defined()) {
    replaced->push_back({own, now});
    return absl::OkStatus();
  }
  if (now.sizes() != own.sizes()) {
    return absl::InvalidArgumentError(c10::str(
        "what replaces ", name,
        " or its gradient in a scope of full parameters has the sizes ",
        now.sizes(), " instead of ", own.sizes()));
  }
  const bool is_inside = now.has_storage() && now.is_alias_of(own);
  if (is_inside && now.storage_offset() == own.storage_offset() &&
      now.strides() == own.strides() && now.dtype() == own.dtype()) {
    return absl::OkStatus();
  }
  // What lies inside may be the value of another, which is written as well.
  replaced->push_back({own, is_inside ? now.detach().clone() : now.detach()});
  return absl::OkStatus();
}

// Takes this rank's shard out of `whole`, which all ranks take from the writer
// where only that has it. Replicas take it from the first of them, so that they
// stay equal whatever each has written. A shard that is as before is not
// written: graphs that have computed with it stay good.
absl::Status WriteShard(ShardedModel& model, int unit,
                        const FlatParameter& flat, at::Tensor whole,
                        bool rank0_only, const at::Tensor& shard) {
  const NormalMode normal;
  const std::string& label = model.unit_name(unit);
  if (rank0_only) {
    // The writer's may be on the CPU; ranks meet on the device.
    whole = whole.defined() ? whole.to(shard.device())
                            : at::empty({flat.layout().padded_numel()},
                                        shard.options().requires_grad(false));
    FSDP_RETURN_IF_ERROR(comm::BroadcastTensor(
        model.communicator(), whole, kWriter, label, DeadlineOf(model)));
  }
  const Slice range = flat.layout().ShardRange(flat.rank());
  const at::Tensor own =
      whole.narrow(0, range.begin, range.numel()).to(shard.device());
  comm::Communicator* const replicas = model.replica_group(unit);
  if (replicas != nullptr && !rank0_only) {
    FSDP_RETURN_IF_ERROR(comm::BroadcastTensor(*replicas, own, /*root=*/0,
                                               label, DeadlineOf(model)));
  }
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard, Use::kUpdate));
  if (!at::equal(shard, own)) shard.copy_(own);
  return absl::OkStatus();
}

}  // namespace

class FullParamsScope::Impl {
 public:
  explicit Impl(const SummonOptions& options) : options_(options) {}

  // Takes the units of one model.
  absl::Status Open(const std::shared_ptr<ShardedModel>& model,
                    const std::vector<int>& units);
  absl::Status Close();
  // Instead of Close(), when not all could be opened: writes nothing back.
  void GiveUp();

 private:
  struct Whole {
    ShardedModel* model;
    int unit;
    FlatParameter* flat;
    at::Tensor values;  // undefined on ranks that get none
    at::Tensor gradients;
    // The caller sees these tensors in them; null where they are undefined.
    std::unique_ptr<LentValues> lent_values = nullptr;
    std::unique_ptr<LentValues> lent_gradients = nullptr;
  };

  absl::Status Take(ShardedModel& model, int unit, FlatParameter& flat);
  void Expose(Whole& whole) const;
  // Copies what has replaced parameters to where the scope has them.
  static absl::Status TakeReplaced(const Whole& whole);
  static void Hide(const Whole& whole);
  // Returns whether the shard gets what the scope has. Not sharded parameters
  // are written in place.
  bool IsWritten(const Whole& whole) const {
    return options_.writeback ||
           whole.model->shard_group(whole.unit).world_size() == 1;
  }
  absl::Status WriteBack(const Whole& whole) const;
  absl::Status WriteGradientsBack(const Whole& whole) const;
  bool HasValues(const ShardedModel& model) const {
    return !options_.rank0_only || model.communicator().rank() == kWriter;
  }

  struct Accessed {
    std::shared_ptr<ShardedModel> model;
    WholeAccess access;  // ends before the model
  };

  const SummonOptions options_;
  std::vector<Accessed> models_;
  std::vector<Whole> wholes_;
};

absl::Status FullParamsScope::Impl::Open(
    const std::shared_ptr<ShardedModel>& model, const std::vector<int>& units) {
  FSDP_ASSIGN_OR_RETURN(WholeAccess access,
                        WholeAccess::Begin(*model, "SummonFullParams()"));
  models_.push_back({model, std::move(access)});
  FSDP_RETURN_IF_ERROR(comm::CheckSame(
      model->communicator(),
      absl::StrCat("recurse ", options_.recurse, ", writeback ",
                   options_.writeback, ", rank0_only ", options_.rank0_only,
                   ", offload_to_cpu ", options_.offload_to_cpu,
                   ", with_grads ", options_.with_grads),
      "the options of SummonFullParams()", DeadlineOf(*model)));
  absl::Status status = TorchToStatus("summoning full parameters", [&] {
    for (int unit : units) {
      for (const auto& flat : model->flats(unit)) {
        ThrowIfError(Take(*model, unit, *flat));
      }
    }
  });
  // The other ranks do not know of it and gather.
  if (!status.ok()) model->Abort(status);
  return status;
}

absl::Status FullParamsScope::Impl::Take(ShardedModel& model, int unit,
                                         FlatParameter& flat) {
  Whole whole{&model, unit, &flat, {}, {}};
  FSDP_ASSIGN_OR_RETURN(whole.values, GatherShards(model, unit, flat.shard()));
  if (options_.with_grads) {
    FSDP_ASSIGN_OR_RETURN(whole.gradients,
                          GatherShards(model, unit, ShardOfGradients(flat)));
  }
  if (!HasValues(model)) {
    whole.values.reset();
    whole.gradients.reset();
  }
  const NormalMode normal;
  if (options_.offload_to_cpu && whole.values.defined()) {
    whole.values = whole.values.cpu();
    if (whole.gradients.defined()) whole.gradients = whole.gradients.cpu();
  }
  wholes_.push_back(std::move(whole));
  Expose(wholes_.back());
  return absl::OkStatus();
}

void FullParamsScope::Impl::Expose(Whole& whole) const {
  static constexpr char kUntil[] = "the scope of SummonFullParams()";
  if (!whole.values.defined()) return;
  const NormalMode normal;
  whole.lent_values = std::make_unique<LentValues>(whole.values, kUntil);
  whole.flat->BindTo(whole.lent_values->tensor());
  if (!whole.gradients.defined()) return;
  whole.lent_gradients = std::make_unique<LentValues>(whole.gradients, kUntil);
  for (int i = 0; i < whole.flat->num_parameters(); ++i) {
    if (!whole.flat->ShardSlice(i).grad().defined()) continue;
    for (const at::Tensor& tensor : whole.flat->parameter(i).tensors) {
      tensor.mutable_grad() =
          whole.flat->ViewOf(whole.lent_gradients->tensor(), i);
    }
  }
}

absl::Status FullParamsScope::Impl::TakeReplaced(const Whole& whole) {
  const NormalMode normal;
  const FlatParameter& flat = *whole.flat;
  std::vector<Replaced> replaced;
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const auto& [name, tensors] = flat.parameter(i);
    for (const at::Tensor& tensor : tensors) {
      FSDP_RETURN_IF_ERROR(
          AddReplaced(name, tensor, flat.ViewOf(whole.lent_values->tensor(), i),
                      &replaced));
      if (whole.lent_gradients == nullptr) continue;
      if (!flat.ShardSlice(i).grad().defined()) continue;
      FSDP_RETURN_IF_ERROR(AddReplaced(
          name, tensor.grad(), flat.ViewOf(whole.lent_gradients->tensor(), i),
          &replaced));
    }
  }
  for (const auto& [own, values] : replaced) {
    if (values.defined()) {
      own.copy_(values);
    } else {
      own.zero_();
    }
  }
  return absl::OkStatus();
}

void FullParamsScope::Impl::Hide(const Whole& whole) {
  if (whole.lent_values == nullptr) return;
  for (int i = 0; i < whole.flat->num_parameters(); ++i) {
    for (const at::Tensor& tensor : whole.flat->parameter(i).tensors) {
      tensor.mutable_grad().reset();
    }
  }
  whole.flat->BindToStorage();
  whole.lent_values->End();
  if (whole.lent_gradients != nullptr) whole.lent_gradients->End();
}

absl::Status FullParamsScope::Impl::WriteBack(const Whole& whole) const {
  if (!IsWritten(whole)) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(WriteShard(*whole.model, whole.unit, *whole.flat,
                                  whole.values, options_.rank0_only,
                                  whole.flat->shard()));
  return options_.writeback && options_.with_grads ? WriteGradientsBack(whole)
                                                   : absl::OkStatus();
}

absl::Status FullParamsScope::Impl::WriteGradientsBack(
    const Whole& whole) const {
  at::Tensor shard = ShardOfGradients(*whole.flat);
  FSDP_RETURN_IF_ERROR(WriteShard(*whole.model, whole.unit, *whole.flat,
                                  whole.gradients, options_.rank0_only, shard));
  const NormalMode normal;
  for (int i = 0; i < whole.flat->num_parameters(); ++i) {
    at::Tensor gradient = whole.flat->ShardSlice(i).grad();
    if (!gradient.defined()) continue;
    const Slice slice = whole.flat->layout().InShard(i, whole.flat->rank());
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(gradient, Use::kUpdate));
    gradient.copy_(shard.narrow(0, slice.begin, slice.numel()));
  }
  return absl::OkStatus();
}

absl::Status FullParamsScope::Impl::Close() {
  constexpr char kWhat[] = "writing full parameters back";
  absl::Status status;
  bool writes = false;
  for (const Whole& whole : wholes_) {
    if (IsWritten(whole)) {
      writes = true;
      if (whole.lent_values != nullptr) {
        status.Update(
            TorchToStatus(kWhat, [&] { return TakeReplaced(whole); }));
      }
    }
    Hide(whole);
  }
  // All ranks write or none does.
  for (const Accessed& accessed : models_) {
    if (!writes) break;
    status = comm::Agree(accessed.model->communicator(), status, kWhat,
                         DeadlineOf(*accessed.model));
  }
  if (status.ok()) {
    status = TorchToStatus(kWhat, [this] {
      for (const Whole& whole : wholes_) ThrowIfError(WriteBack(whole));
    });
    for (const Accessed& accessed : models_) {
      if (!status.ok()) accessed.model->Abort(status);
    }
  }
  wholes_.clear();
  models_.clear();
  return status;
}

void FullParamsScope::Impl::GiveUp() {
  for (const Whole& whole : wholes_) Hide(whole);
  wholes_.clear();
  models_.clear();
}

FullParamsScope::FullParamsScope(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
FullParamsScope::FullParamsScope(FullParamsScope&&) noexcept = default;

FullParamsScope& FullParamsScope::operator=(FullParamsScope&& other) noexcept {
  std::unique_ptr<Impl> next = std::move(other.impl_);
  const FullParamsScope former(std::move(*this));
  impl_ = std::move(next);
  return *this;
}

FullParamsScope::~FullParamsScope() {
  const absl::Status status = Close();
  if (!status.ok()) {
    TORCH_WARN("fsdp: at the end of a scope of full parameters: ",
               status.ToString());
  }
}

absl::Status FullParamsScope::Close() {
  if (impl_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<Impl> impl = std::move(impl_);
  return impl->Close();
}

absl::StatusOr<FullParamsScope> SummonFullParams(torch::nn::Module& module,
                                                 const SummonOptions& options) {
  std::vector<std::shared_ptr<ShardedModel>> models;
  std::map<ShardedModel*, std::vector<int>> units;
  const auto add = [&](torch::nn::Module& inner) {
    const std::optional<UnitHandle> handle = FindUnit(inner);
    if (!handle.has_value()) return;
    std::vector<int>& of_model = units[handle->model.get()];
    if (of_model.empty()) models.push_back(handle->model);
    // A module in two places is met twice.
    if (std::find(of_model.begin(), of_model.end(), handle->unit) ==
        of_model.end()) {
      of_model.push_back(handle->unit);
    }
  };
  if (options.recurse) {
    module.apply(add);
  } else {
    add(module);
  }
  FullParamsScope scope(std::make_unique<FullParamsScope::Impl>(options));
  for (const std::shared_ptr<ShardedModel>& model : models) {
    absl::Status status = scope.impl_->Open(model, units[model.get()]);
    if (status.ok()) continue;
    scope.impl_->GiveUp();
    return status;
  }
  return scope;
}

namespace {

absl::Status VisitFlat(ShardedModel& model, int unit, const FlatParameter& flat,
                       const FullParameterVisitor& visit,
                       const VisitOptions& options, absl::Status* visited) {
  FSDP_ASSIGN_OR_RETURN(at::Tensor whole,
                        GatherShards(model, unit, flat.shard()));
  const bool visits =
      !options.rank0_only || model.communicator().rank() == kWriter;
  LentValues lent(whole, "the visit of ForEachFullParameter()");
  for (int i = 0; visits && i < flat.num_parameters(); ++i) {
    if (!visited->ok()) break;
    const std::string& name = flat.parameter(i).name;
    *visited = TorchToStatus(absl::StrCat("visiting parameter ", name), [&] {
      ThrowIfError(visit(name, flat.ViewOf(lent.tensor(), i)));
    });
  }
  lent.End();
  if (!options.writeback) return absl::OkStatus();
  // Nobody writes back what somebody could not edit.
  *visited = comm::Agree(model.communicator(), *visited,
                         "visiting full parameters", DeadlineOf(model));
  if (!visited->ok()) return absl::OkStatus();
  return WriteShard(model, unit, flat, whole, options.rank0_only, flat.shard());
}

absl::StatusOr<UnitHandle> UnitOf(torch::nn::Module& module) {
  std::optional<UnitHandle> handle = FindUnit(module);
  if (handle.has_value()) return *std::move(handle);
  return absl::FailedPreconditionError(absl::StrCat(
      "module ", module.name(),
      " is no unit of a sharded model, so it has nothing to gather or free. "
      "Units are the root and what Options::wrap_policy has chosen"));
}

}  // namespace

absl::Status ForEachFullParameter(ShardedModel& model,
                                  const FullParameterVisitor& visit,
                                  const VisitOptions& options) {
  return InWholeAccess(model, "ForEachFullParameter()", [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(comm::CheckSame(
        model.communicator(),
        absl::StrCat("writeback ", options.writeback, ", rank0_only ",
                     options.rank0_only),
        "the options of ForEachFullParameter()", DeadlineOf(model)));
    absl::Status visited;
    for (int unit = 0; unit < model.num_units(); ++unit) {
      for (const auto& flat : model.flats(unit)) {
        // A rank whose visitor has failed goes on gathering with the others.
        const absl::Status status =
            VisitFlat(model, unit, *flat, visit, options, &visited);
        if (status.ok()) continue;
        // A group of some ranks has failed: others wait in groups of theirs.
        model.Abort(status);
        return visited.ok() ? status : visited;
      }
    }
    return comm::Agree(model.communicator(), visited,
                       "visiting full parameters", DeadlineOf(model));
  });
}

absl::Status UnshardHandle::Wait() { return model_->WaitUnshard(unit_); }

absl::StatusOr<UnshardHandle> Unshard(torch::nn::Module& module) {
  FSDP_ASSIGN_OR_RETURN(const UnitHandle handle, UnitOf(module));
  FSDP_RETURN_IF_ERROR(handle.model->Unshard(handle.unit));
  return UnshardHandle(handle.model, handle.unit);
}

absl::Status Reshard(torch::nn::Module& module) {
  FSDP_ASSIGN_OR_RETURN(const UnitHandle handle, UnitOf(module));
  return handle.model->Reshard(handle.unit);
}

absl::StatusOr<std::vector<RebuiltParameter>> RebuildFullParams(
    ShardedModel& model) {
  for (int unit = 0; unit < model.num_units(); ++unit) {
    FSDP_RETURN_IF_ERROR(model.Unshard(unit));
  }
  std::vector<RebuiltParameter> rebuilt;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    FSDP_RETURN_IF_ERROR(model.WaitUnshard(unit));
    const bool sharded = model.shard_group(unit).world_size() > 1;
    for (const auto& flat : model.flats(unit)) {
      // Ends with the gather: what lies in its memory then is none of the
      // caller's.
      const at::Tensor& any = flat->parameter(0).tensors.front();
      rebuilt.push_back(
          {model.unit_name(unit),
           TensorOver(any.storage(), 0, {flat->layout().padded_numel()}, {1},
                      flat->unsharded_dtype()),
           sharded || RestsElsewhere(flat->shard()) ||
               flat->compute_dtype() != flat->dtype()});
    }
  }
  return rebuilt;
}

}  // namespace fsdp
