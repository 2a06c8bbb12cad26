#include "fsdp/transparent/op_observer.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/autograd_node.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

using Tags = absl::InlinedVector<const StorageTag*, 4>;

thread_local int observers_of_thread = 0;
thread_local int operators_under_way = 0;

// Marks a range without inputs: it is no operator but the engine's, or a user's
// own recording.
struct NotAnOperator : at::ObserverContext {};

void CollectFrom(const at::Tensor& tensor, Tags& tags) {
  const StorageTag* tag = TagOf(tensor);
  if (tag == nullptr) return;
  if (!absl::c_linear_search(tags, tag)) {
    tags.push_back(tag);
  }
}

void CollectFrom(const c10::IValue& value, Tags& tags) {
  if (value.isTensor()) {
    CollectFrom(value.toTensor(), tags);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      // All elements have one type, and most lists are of integers.
      if (!element.isTensor() && !element.isNone()) return;
      CollectFrom(element, tags);
    }
  }
}

void Tell(const Tags& tags, bool nested) {
  absl::InlinedVector<int, 4> units;
  for (size_t i = 0; i < tags.size(); ++i) {
    OpListener* const listener = tags[i]->listener;
    const auto is_same = [listener](const StorageTag* tag) {
      return tag->listener == listener;
    };
    if (std::any_of(tags.begin(), tags.begin() + i, is_same)) continue;
    units.clear();
    for (const StorageTag* tag : tags) {
      if (is_same(tag)) units.push_back(tag->unit);
    }
    listener->OnOperator(units, nested);
  }
}

// Judges by the name, which costs nothing: the name of an in-place operator
// ends in "_", and others write to an argument "out".
bool MayWrite(const at::RecordFunction& function) {
  return absl::EndsWith(function.name(), "_") ||
         absl::StrContains(function.overload_name(), "out");
}

// Returns whether the operator changes only a tensor's view of its memory or
// its autograd state.
bool LeavesValues(absl::string_view name) {
  static constexpr absl::string_view kNames[] = {
      "aten::as_strided_", "aten::detach_",
      "aten::rename_",     "aten::requires_grad_",
      "aten::resize_",     "aten::set_",
      "aten::squeeze_",    "aten::swapaxes_",
      "aten::swapdims_",   "aten::t_",
      "aten::transpose_",  "aten::unsqueeze_"};
  return absl::c_linear_search(kNames, name);
}

void TellOfWrites(const at::RecordFunction& function,
                  c10::ArrayRef<const c10::IValue> inputs) {
  const auto schema = function.operator_schema();
  if (!schema.has_value() || LeavesValues(schema->name())) return;
  const auto tell = [](const c10::IValue& value) {
    if (!value.isTensor()) return;
    const StorageTag* tag = TagOf(value.toTensor());
    if (tag != nullptr) tag->listener->OnWrite(value.toTensor(), tag->unit);
  };
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < std::min(arguments.size(), inputs.size()); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (inputs[i].isList()) {
      for (const c10::IValue& element : inputs[i].toListRef()) tell(element);
    } else {
      tell(inputs[i]);
    }
  }
}

std::unique_ptr<at::ObserverContext> OnStart(
    const at::RecordFunction& function) {
  c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  if (inputs.empty()) return std::make_unique<NotAnOperator>();
  // An operator that is called through the stack shows the whole stack.
  const size_t count = function.num_inputs();
  if (count < inputs.size()) inputs = inputs.slice(inputs.size() - count);
  const bool nested = operators_under_way++ > 0;
  Tags tags;
  for (const c10::IValue& input : inputs) CollectFrom(input, tags);
  if (tags.empty()) return nullptr;
  Tell(tags, nested);
  if (MayWrite(function)) TellOfWrites(function, inputs);
  return nullptr;
}

void OnEnd(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) --operators_under_way;
}

// Looks the handles up, because autograd's engine restores a thread's callbacks
// after each node.
std::vector<at::CallbackHandle> OwnCallbacks() {
  std::vector<at::CallbackHandle> handles;
  for (const at::RecordFunctionCallbacksEntry& entry :
       at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() == &OnStart) handles.push_back(entry.handle_);
  }
  return handles;
}

}  // namespace

const StorageTag* TagOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  // A sparse tensor has no storage; that is no error here.
  return static_cast<const StorageTag*>(
      flat_param::TagOf(tensor.unsafeGetTensorImpl()->unsafe_storage()));
}

OpObserver::OpObserver() : thread_(std::this_thread::get_id()) {
  ++observers_of_thread;
  if (!OwnCallbacks().empty()) return;
  at::addThreadLocalCallback(at::RecordFunctionCallback(&OnStart, &OnEnd)
                                 .needsInputs(true)
                                 .scopes({at::RecordScope::FUNCTION}));
}

OpObserver::~OpObserver() {
  if (thread_ != std::this_thread::get_id()) return;
  if (--observers_of_thread > 0) return;
  for (const at::CallbackHandle handle : OwnCallbacks()) {
    at::removeCallback(handle);
  }
}

ModelTags::ModelTags(ShardedModel& model, OpListener* listener)
    : model_(model), tags_(model.num_units()) {
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    tags_[unit] = {listener, unit};
    for (const auto& flat : model_.flats(unit)) flat->SetTag(&tags_[unit]);
  }
}

ModelTags::~ModelTags() {
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    for (const auto& flat : model_.flats(unit)) flat->SetTag(nullptr);
  }
}

namespace {

class WriteWatch final : public UnitObserver, private OpListener {
 public:
  explicit WriteWatch(ShardedModel* model)
      : model_(model), seen_(model->num_units()), tags_(*model, this) {}

  // Also watches a forward inside a watched one.
  void AfterPreForward(int unit) override {
    if (InsideBackward()) return;
    const int mode = (c10::GradMode::is_enabled() ? 2 : 0) +
                     (model_->precision().is_training() ? 1 : 0);
    bool& seen = seen_[unit][mode];
    if (watched_ == 0 && seen) return;
    seen = true;
    if (watched_++ == 0) observer_.emplace();
  }
  absl::Status BeforePostForward(int,
                                 const std::vector<at::Tensor*>&) override {
    return TakeFailure();
  }
  void AfterPostForward(int, const std::vector<NodePtr>&) override {
    if (InsideBackward() || watched_ == 0) return;
    if (--watched_ == 0) observer_.reset();
  }
  void OnGivenUp() override {
    watched_ = 0;
    observer_.reset();
    failure_ = absl::OkStatus();
  }
  absl::Status TakeFailure() override {
    return std::exchange(failure_, absl::OkStatus());
  }

 private:
  static constexpr int kModes = 4;

  void OnOperator(absl::Span<const int>, bool) override {}
  void OnWrite(const at::Tensor& tensor, int unit) override {
    if (watched_ == 0 || InsideBackward()) return;
    failure_.Update(model_->RefuseWrite(unit, tensor));
    // The next forward may write again, so every unit is watched anew.
    for (auto& seen : seen_) seen = {};
  }

  ShardedModel* const model_;
  // In which modes a forward of each unit was watched.
  std::vector<std::array<bool, kModes>> seen_;
  int watched_ = 0;  // forwards under way
  std::optional<OpObserver> observer_;
  absl::Status failure_;
  const ModelTags tags_;
};

}  // namespace

std::unique_ptr<UnitObserver> MakeWriteWatch(ShardedModel* model) {
  return std::make_unique<WriteWatch>(model);
}

}  // namespace fsdp
