#include "fsdp/deferred/deferred_tensor.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <set>
#include <string>

#include "absl/algorithm/container.h"
#include "base/check.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"

namespace fsdp {
namespace {

// A storage without memory has this instead.
struct History {
  uint64_t storage;                        // number of the storage
  std::shared_ptr<const RecordedOp> last;  // that has written it
};

void DeleteHistory(void* history) { delete static_cast<History*>(history); }

// Returns null for ordinary tensors. Costs a nanosecond.
History* HistoryOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data =
      tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &DeleteHistory
             ? static_cast<History*>(data.get_context())
             : nullptr;
}

// Returns a null pointer that owns `history`.
c10::DataPtr PointerWith(History history, c10::Device device) {
  return c10::DataPtr(nullptr, new History(std::move(history)), &DeleteHistory,
                      device);
}

// Returns a number that orders operators and identifies storages.
uint64_t NextNumber() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Returns whether `op` overwrites the whole storage of `target` without reading
// it.
bool Overwrites(const c10::OperatorHandle& op, const at::Tensor& target) {
  static const auto* const kFills = new std::set<std::string>{
      "aten::fill_", "aten::normal_", "aten::uniform_", "aten::zero_"};
  return kFills->count(op.schema().name()) > 0 && target.is_contiguous() &&
         target.nbytes() == target.storage().nbytes();
}

c10::Device DeviceOf(const c10::FunctionSchema& schema,
                     const torch::jit::Stack& arguments) {
  const std::optional<int> device = schema.argumentIndexWithName("device");
  if (device.has_value() && arguments[*device].isDevice()) {
    return arguments[*device].toDevice();
  }
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) return argument.toTensor().device();
  }
  return c10::Device(c10::kCPU);
}

at::Generator NewGenerator(c10::Device device, uint64_t seed) {
  at::Generator generator =
      at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed);
  return generator;
}

// Returns the overload that also takes a generator, such as "rand.generator"
// for "rand".
std::optional<c10::OperatorHandle> WithGenerator(
    const c10::OperatorHandle& op) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (const char* overload : {"generator", "low_generator"}) {
    auto other =
        c10::Dispatcher::singleton().findSchema({op.schema().name(), overload});
    if (!other.has_value()) continue;
    const c10::FunctionSchema& schema = other->schema();
    if (schema.arguments().size() == arguments.size() + 1 &&
        absl::c_all_of(arguments, [&](const c10::Argument& argument) {
          return schema.argumentIndexWithName(argument.name()).has_value();
        })) {
      return other;
    }
  }
  return std::nullopt;
}

// Passes a new generator if the operator takes one: all threads share the
// default one.
void RunSeeded(const c10::OperatorHandle& op, torch::jit::Stack& stack,
               uint64_t seed) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::Device device = DeviceOf(schema, stack);
  if (const auto index = schema.argumentIndexWithName("generator")) {
    stack[*index] = NewGenerator(device, seed);
    op.callBoxed(&stack);
    return;
  }
  const std::optional<c10::OperatorHandle> other = WithGenerator(op);
  if (!other.has_value()) {
    const SeedGuard seeded(seed);
    op.callBoxed(&stack);
    return;
  }
  torch::jit::Stack arguments;
  for (const c10::Argument& argument : other->schema().arguments()) {
    const auto index = schema.argumentIndexWithName(argument.name());
    arguments.push_back(index.has_value()
                            ? stack[*index]
                            : c10::IValue(NewGenerator(device, seed)));
  }
  other->callBoxed(&arguments);
  stack = std::move(arguments);
}

// Returns the bytes from the beginning of the storage.
int64_t BytesOf(const Geometry& geometry) {
  int64_t end = geometry.offset + 1;
  for (size_t d = 0; d < geometry.sizes.size(); ++d) {
    if (geometry.sizes[d] == 0) return 0;
    end += (geometry.sizes[d] - 1) * geometry.strides[d];
  }
  return end * static_cast<int64_t>(c10::elementSize(geometry.dtype));
}

}  // namespace

Geometry Geometry::Of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
          tensor.scalar_type(), tensor.device(),        tensor.is_conj(),
          tensor.is_neg()};
}

at::Tensor Geometry::Over(const c10::Storage& storage) const {
  const at::Tensor tensor = TensorOver(storage, offset, sizes, strides, dtype);
  tensor._set_conj(is_conjugated);
  tensor._set_neg(is_negated);
  return tensor;
}

c10::IValue MapTensors(const c10::IValue& value,
                       absl::FunctionRef<at::Tensor(const at::Tensor&)> map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(map(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorVector()) {
      mapped.push_back(tensor.has_value() ? std::optional(map(*tensor))
                                          : std::nullopt);
    }
    return mapped;
  }
  return value;
}

RecordedOp::RecordedOp(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       std::optional<uint64_t> seed, int64_t copied_below)
    : op_(op), seed_(seed), sequence_(NextNumber()) {
  const auto keep = [&](const at::Tensor& tensor) {
    RecordedInput& input = inputs_.emplace_back();
    if (!tensor.defined()) return tensor;
    if (const History* history = HistoryOf(tensor)) {
      input = {history->storage, history->last, Geometry::Of(tensor)};
      return at::Tensor();
    }
    at::Tensor kept = static_cast<int64_t>(tensor.nbytes()) < copied_below
                          ? tensor.detach().clone()
                          : tensor.detach();
    input.version = kept._version();
    return kept;
  };
  for (const c10::IValue& argument : arguments) {
    // The seed replaces a generator.
    arguments_.push_back(argument.isGenerator() ? c10::IValue()
                                                : MapTensors(argument, keep));
  }
  if (!arguments.empty() && arguments.front().isTensor() &&
      inputs_.front().storage != 0 &&
      Overwrites(op, arguments.front().toTensor())) {
    inputs_.front().last = nullptr;
  }
}

// Destroys the history in a loop: it may be thousands of operators deep.
RecordedOp::~RecordedOp() {
  std::vector<std::shared_ptr<const RecordedOp>> doomed;
  const auto take = [&doomed](std::vector<RecordedInput>& inputs) {
    for (RecordedInput& input : inputs) {
      if (input.last != nullptr) doomed.push_back(std::move(input.last));
    }
  };
  take(inputs_);
  while (!doomed.empty()) {
    const std::shared_ptr<const RecordedOp> op = std::move(doomed.back());
    doomed.pop_back();
    // Takes an operator apart only if nobody else holds it.
    if (op.use_count() == 1) take(const_cast<RecordedOp&>(*op).inputs_);
  }
}

void RecordedOp::AddOutput(const at::Tensor& like) {
  RecordedInput& output = outputs_.emplace_back();
  output.storage = NextNumber();
  output.geometry = Geometry::Of(like);
}

torch::jit::Stack RecordedOp::Run(
    absl::FunctionRef<at::Tensor(const RecordedInput&)> tensor_of) const {
  torch::jit::Stack stack;
  size_t next = 0;
  const auto give = [&](const at::Tensor& kept) {
    const RecordedInput& input = inputs_[next++];
    if (input.storage != 0) return tensor_of(input);
    TORCH_CHECK(!kept.defined() || kept._version() == input.version,
                "a tensor that a deferred module was initialised from has been "
                "changed since: keep it as it is until the module has values",
                kMisuseMark);
    return kept;
  };
  for (const c10::IValue& argument : arguments_) {
    stack.push_back(MapTensors(argument, give));
  }
  if (seed_.has_value()) {
    RunSeeded(op_, stack, *seed_);
  } else {
    op_.callBoxed(&stack);
  }
  return stack;
}

at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device) {
  const RecordedInput& made = op->outputs()[output];
  const Geometry& geometry = made.geometry;
  c10::Storage storage = flat_param::MakeArmedStorage(
      BytesOf(geometry), device,
      "a tensor that was made under fsdp::DeferredInit has no values yet: "
      "shard its module by FullyShard(), or call fsdp::Materialize() first. "
      "Where a constructor needs values, or writes them by pointer, make that "
      "tensor under fsdp::EagerInit");
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      PointerWith({made.storage, op}, device));
  return TensorOver(storage, geometry.offset, geometry.sizes, geometry.strides,
                    geometry.dtype);
}

void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op) {
  HistoryOf(tensor)->last = op;
}

namespace {

// Returns the operators that lead to `last`, in the order of their recording.
std::vector<std::shared_ptr<const RecordedOp>> HistoryUntil(
    const std::shared_ptr<const RecordedOp>& last) {
  std::map<uint64_t, std::shared_ptr<const RecordedOp>> found;
  std::vector<std::shared_ptr<const RecordedOp>> next = {last};
  while (!next.empty()) {
    const std::shared_ptr<const RecordedOp> op = std::move(next.back());
    next.pop_back();
    if (!found.emplace(op->sequence(), op).second) continue;
    for (const RecordedInput& input : op->inputs()) {
      if (input.last != nullptr) next.push_back(input.last);
    }
  }
  std::vector<std::shared_ptr<const RecordedOp>> ops;
  ops.reserve(found.size());
  for (auto& [sequence, op] : found) ops.push_back(std::move(op));
  return ops;
}

using Memory = std::map<uint64_t, c10::Storage>;

at::Tensor In(Memory& memory, const RecordedInput& input) {
  const Geometry& geometry = input.geometry;
  if (input.last == nullptr && memory.count(input.storage) == 0) {
    const at::Tensor made = at::empty_strided(
        geometry.sizes, geometry.strides,
        at::TensorOptions(geometry.device).dtype(geometry.dtype));
    memory.emplace(input.storage, made.storage());
  }
  return geometry.Over(memory.at(input.storage));
}

// Copies the output into the announced layout if the operator has used another.
at::Tensor AsAnnounced(const at::Tensor& actual, const Geometry& announced) {
  TORCH_CHECK(actual.sizes() == c10::IntArrayRef(announced.sizes) &&
                  actual.scalar_type() == announced.dtype,
              "a deferred operator has returned a tensor of other sizes or "
              "dtype than its meta function says");
  if (actual.strides() == c10::IntArrayRef(announced.strides) &&
      actual.storage_offset() == announced.offset) {
    return actual;
  }
  FSDP_CHECK(announced.offset == 0);
  return at::empty_strided(announced.sizes, announced.strides, actual.options())
      .copy_(actual);
}

// Returns the storage of `history` with its values.
c10::Storage Replay(const History& history) {
  // The caller's autograd mode and recording scope must not matter.
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(
      c10::DispatchKey::DeferredInit);
  Memory memory;
  for (const auto& op : HistoryUntil(history.last)) {
    const torch::jit::Stack outputs = op->Run(
        [&memory](const RecordedInput& input) { return In(memory, input); });
    for (size_t i = 0; i < op->outputs().size(); ++i) {
      const RecordedInput& output = op->outputs()[i];
      memory.insert_or_assign(
          output.storage,
          AsAnnounced(outputs[i].toTensor(), output.geometry).storage());
    }
  }
  return memory.at(history.storage);
}

std::recursive_mutex& DefaultGenerators() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

bool IsDeferred(const at::Tensor& tensor) {
  return HistoryOf(tensor) != nullptr;
}

at::Tensor ValueOf(const at::Tensor& tensor) {
  const History* history = HistoryOf(tensor);
  if (history == nullptr) return tensor;
  return Geometry::Of(tensor).Over(Replay(*history));
}

void Materialize(const at::Tensor& tensor) {
  const History* history = HistoryOf(tensor);
  if (history == nullptr) return;
  const c10::Storage values = Replay(*history);
  c10::StorageImpl& impl = *tensor.storage().unsafeGetStorageImpl();
  FSDP_CHECK(values.nbytes() >= impl.nbytes());
  flat_param::SetArmed(impl, false);
  // Frees the storage of the values together with this one.
  auto* owner = new c10::Storage(values);
  impl.set_data_ptr_noswap(c10::DataPtr(
      owner->mutable_data(), owner,
      [](void* storage) { delete static_cast<c10::Storage*>(storage); },
      impl.device()));
}

SeedGuard::SeedGuard(uint64_t seed) : only_(DefaultGenerators()) {
  Seed(at::globalContext().defaultGenerator(c10::kCPU), seed);
  if (!at::hasCUDA()) return;
  const auto devices = static_cast<c10::DeviceIndex>(at::getNumGPUs());
  for (c10::DeviceIndex i = 0; i < devices; ++i) {
    Seed(at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, i)),
         seed);
  }
}

SeedGuard::~SeedGuard() {
  for (auto& [generator, state] : saved_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

void SeedGuard::Seed(at::Generator generator, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  saved_.emplace_back(generator, generator.get_state());
  generator.set_current_seed(seed);
}

}  // namespace fsdp
