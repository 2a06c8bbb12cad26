#include "fsdp/deferred/deferred_tensor.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/tensor_over.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/deferred/recorded_op.h"

namespace fsdp {

using deferred_internal::Geometry;
using deferred_internal::History;
using deferred_internal::HistoryOf;
using deferred_internal::PointerWith;
using deferred_internal::RecordedInput;
using deferred_internal::RecordedOp;
using flat_param::MakeArmedStorage;
using flat_param::SetArmed;

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
  return TensorOver(memory.at(input.storage), geometry.offset, geometry.sizes,
                    geometry.strides, geometry.dtype);
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

void GiveMemory(const at::Tensor& tensor, const c10::Storage& values) {
  c10::StorageImpl& impl = *tensor.storage().unsafeGetStorageImpl();
  FSDP_CHECK(values.nbytes() >= impl.nbytes());
  SetArmed(impl, false);
  // Frees the storage of the values together with this one.
  auto* owner = new c10::Storage(values);
  impl.set_data_ptr_noswap(c10::DataPtr(
      owner->mutable_data(), owner,
      [](void* storage) { delete static_cast<c10::Storage*>(storage); },
      impl.device()));
}

}  // namespace

bool IsDeferred(const at::Tensor& tensor) {
  return HistoryOf(tensor) != nullptr;
}

at::Tensor ValueOf(const at::Tensor& tensor) {
  const History* history = HistoryOf(tensor);
  if (history == nullptr) return tensor;
  return TensorOver(Replay(*history), tensor.storage_offset(), tensor.sizes(),
                    tensor.strides(), tensor.scalar_type());
}

void Materialize(const at::Tensor& tensor) {
  const History* history = HistoryOf(tensor);
  if (history != nullptr) GiveMemory(tensor, Replay(*history));
}

namespace deferred_internal {

namespace {

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

at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device) {
  const RecordedInput& made = op->outputs()[output];
  const Geometry& geometry = made.geometry;
  c10::Storage storage = MakeArmedStorage(
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

}  // namespace deferred_internal
}  // namespace fsdp
