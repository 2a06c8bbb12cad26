#include "testing/simulation/operation.h"

#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::simulation {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::ReduceOp;

// --- Arithmetic, as the contract of collectives says it, by LibTorch: it owes
// nothing to the code that other backends share.

// Is valid as long as `data` is.
at::Tensor TensorOver(const char* data, size_t bytes, at::ScalarType dtype) {
  const auto size = static_cast<int64_t>(bytes / c10::elementSize(dtype));
  return at::from_blob(const_cast<char*>(data), {size},
                       at::TensorOptions().dtype(dtype));
}

std::vector<char> BytesOf(const at::Tensor& tensor) {
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  return {data, data + tensor.nbytes()};
}

// Reduces `bytes` of each input in the order of the inputs. Halves are added as
// float32 and rounded once.
std::vector<char> ReduceInOrder(at::ScalarType dtype, ReduceOp op,
                                const std::vector<const char*>& inputs,
                                size_t bytes) {
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor value;
  for (const char* const input : inputs) {
    const at::Tensor next =
        TensorOver(input, bytes, dtype).to(is_half ? at::kFloat : dtype);
    value = !value.defined()       ? next
            : op == ReduceOp::kSum ? at::add(value, next)
            : op == ReduceOp::kMin ? at::minimum(value, next)
                                   : at::maximum(value, next);
  }
  return BytesOf(value.to(dtype));
}

// Returns what `scaled` makes of `before`, of `out_dtype`, and `sum`, of
// `dtype`, in float32 unless one of them is in double.
std::vector<char> ScaleInto(at::ScalarType dtype, const std::vector<char>& sum,
                            comm::ScaledSum scaled, at::ScalarType out_dtype,
                            const std::vector<char>& before) {
  const bool in_double = dtype == at::kDouble || out_dtype == at::kDouble;
  const at::ScalarType wide = in_double ? at::kDouble : at::kFloat;
  at::Tensor result =
      at::mul(TensorOver(sum.data(), sum.size(), dtype).to(wide), scaled.scale);
  if (scaled.accumulate) {
    result = at::add(
        TensorOver(before.data(), before.size(), out_dtype).to(wide), result);
  }
  return BytesOf(result.to(out_dtype));
}

// --- Buffers, and when they are read

constexpr int kPoison = 0xFF;  // NaN of every floating-point dtype

uint64_t Hash(const char* data, size_t bytes) {
  return std::hash<std::string_view>()({data, bytes});
}

// Returns null if no memory is left, which the storage may say by throwing.
const char* DataOf(const c10::StorageImpl& storage) {
  try {
    return static_cast<const char*>(storage.data());
  } catch (const c10::Error&) {
    return nullptr;
  }
}

bool TakesAtStart(const OperationContext& context) {
  switch (context.options->moves) {
    case Moves::kAtStart:
      return true;
    case Moves::kAtEnd:
      return false;
    default:
      return context.simulation->Chance(250);
  }
}

bool ReadsAtEnd(const OperationContext& context) {
  return context.options->moves == Moves::kAtEnd ||
         context.simulation->Chance(400);
}

}  // namespace

Operation::Operation(OperationContext context, int64_t sequence)
    : context_(std::move(context)),
      sequence_(sequence),
      takes_at_start_(TakesAtStart(context_)),
      reads_at_end_(ReadsAtEnd(context_)),
      sides_(context_.processes.size()) {}

Operation::Memory Operation::MemoryOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor, static_cast<char*>(tensor.mutable_data_ptr()),
          tensor.nbytes()};
}

// Violations of a dead process do not count.
void Operation::Violation(int rank, absl::string_view text) {
  if (context_.simulation->IsDead(context_.processes[rank])) return;
  context_.simulation->Violation(text);
}

void Operation::CheckMemory(int rank, const Memory& memory) {
  if (memory.bytes == 0) return;
  const c10::StorageImpl& storage =
      *memory.tensor.storage().unsafeGetStorageImpl();
  const char* const begin = DataOf(storage);
  if (begin != nullptr && memory.data >= begin &&
      memory.data + memory.bytes <= begin + storage.nbytes()) {
    return;
  }
  Violation(rank, absl::StrCat("rank ", rank, " has given up memory of ",
                               comm::Name(*sides_[rank].call, sequence_),
                               " before that was done"));
  Cancel(rank);
}

// Returns whether `out` and `in` share memory.
bool Operation::IsSlice(const Side& side) {
  return side.out.data < side.in.data + side.in.bytes &&
         side.in.data < side.out.data + side.out.bytes;
}

bool Operation::SumsInto(int rank, const void* out) const {
  const Side& side = sides_[rank];
  return side.call && side.scaled && !side.has_result && !side.cancelled &&
         side.out.data == out;
}

void Operation::Poison(Side& side) {
  // What earlier sums have left may be read while this one runs.
  if (side.scaled && side.scaled->accumulate) return;
  if (side.out.bytes == 0 || context_.memories->Contains(side.out.data)) return;
  const bool is_gather = side.call->collective == Collective::kAllGather;
  const bool receives = side.call->collective == Collective::kBroadcast &&
                        side.reads == 0 && &side != &sides_[root_];
  if (receives) std::memset(side.out.data, kPoison, side.out.bytes);
  if (side.in_place || (IsSlice(side) && !is_gather)) return;
  const std::vector<char> own(side.in.data, side.in.data + side.in.bytes);
  std::memset(side.out.data, kPoison, side.out.bytes);
  if (IsSlice(side)) std::memcpy(side.in.data, own.data(), own.size());
}

// Keeps the result if it is a part of the input. A result elsewhere belongs to
// its owner, who may have given it up.
void Operation::OverwriteInput(const Side& side) {
  const bool has_result = IsSlice(side);
  std::vector<char> kept;
  if (has_result) kept.assign(side.out.data, side.out.data + side.out.bytes);
  std::memset(side.in.data, kPoison, side.in.bytes);
  if (has_result) std::memcpy(side.out.data, kept.data(), kept.size());
}

// Leaves out the part that is also to be written.
uint64_t Operation::HashInput(int rank) const {
  const Side& side = sides_[rank];
  const char* const begin = side.in.data;
  const char* const end = begin + side.in.bytes;
  if (side.in_place || side.call->collective == Collective::kAllGather ||
      !IsSlice(side)) {
    return Hash(begin, side.in.bytes);
  }
  const char* const rest = side.out.data + side.out.bytes;
  return 31 * Hash(begin, side.out.data - begin) + Hash(rest, end - rest);
}

void Operation::Enter(int rank, const comm::Call& call, comm::ReduceOp op,
                      int root, const Buffers& buffers,
                      std::shared_ptr<Operation> in_front) {
  op_ = op;
  root_ = root;
  Side& side = sides_[rank];
  side.call = call;
  side.out = MemoryOf(buffers.out);
  side.in = MemoryOf(buffers.in);
  side.scaled = buffers.scaled;
  side.in_front = std::move(in_front);
  side.in_place = side.in.data == side.out.data &&
                  side.in.bytes == side.out.bytes && side.in.bytes > 0;
  side.before.assign(side.out.data, side.out.data + side.out.bytes);
  side.clock = context_.memories->Release(context_.processes[rank]);
  const bool sends_and_forgets = call.collective == Collective::kBroadcast &&
                                 rank == root &&
                                 context_.options->root_ends_early;
  if (takes_at_start_ || sends_and_forgets) {
    side.taken.assign(side.in.data, side.in.data + side.in.bytes);
    side.reads = sides_.size();
  }
  Poison(side);
  side.in_hash = HashInput(rank);
  ++entered_;
  for (size_t any = 0; any < sides_.size(); ++any) {
    if (CanLaunch(static_cast<int>(any))) Launch(static_cast<int>(any));
  }
}

void Operation::Cancel(int rank) {
  if (!all_entered()) never_ends_ = true;
  sides_[rank].cancelled = true;
  sides_[rank].out.tensor = at::Tensor();
  sides_[rank].in.tensor = at::Tensor();
}

bool Operation::Reads(int reader, int source) const {
  return sides_[reader].call->collective != Collective::kBroadcast ||
         source == root_;
}

bool Operation::CanLaunch(int rank) const {
  if (!sides_[rank].call.has_value() || sides_[rank].launched || never_ends_) {
    return false;
  }
  const bool is_broadcast =
      sides_[rank].call->collective == Collective::kBroadcast;
  if (!is_broadcast || !context_.options->root_ends_early) {
    return all_entered();
  }
  return sides_[root_].call.has_value();
}

// Plans when this rank's result is read and written.
void Operation::Launch(int rank) {
  Simulation& simulation = *context_.simulation;
  const NetworkOptions& options = *context_.options;
  sides_[rank].launched = true;
  absl::Duration whole = simulation.RandomDelay(options.slowest);
  if (simulation.Chance(options.lost_per_mille)) whole += options.slowest * 10;
  absl::Duration reads = whole;
  if (!reads_at_end_) {
    reads = absl::Nanoseconds(
        simulation.Random(absl::ToInt64Nanoseconds(whole) + 1));
  }
  const std::shared_ptr<Operation> self = shared_from_this();
  simulation.After(reads, [self, rank, rest = whole - reads] {
    if (self->sides_[rank].cancelled) return;
    for (size_t source = 0; source < self->sides_.size(); ++source) {
      if (!self->Reads(rank, static_cast<int>(source))) continue;
      const Side& side = self->sides_[source];
      if (side.taken.empty() && side.in.bytes > 0 &&
          (side.cancelled || side.lost)) {
        return;  // the result never comes
      }
    }
    const std::vector<char> result = self->Compute(rank);
    if (self->sides_[rank].cancelled) return;
    self->ReadFor(rank);
    self->context_.simulation->After(
        rest, [self, rank, result] { self->WriteTo(rank, result); });
  });
}

const char* Operation::InputOf(int source, size_t offset) {
  Side& side = sides_[source];
  if (!side.taken.empty()) return side.taken.data() + offset;
  CheckMemory(source, side.in);
  return side.cancelled ? nullptr : side.in.data + offset;
}

std::vector<char> Operation::ComputeSum(int rank, size_t slot_bytes) {
  const Side& side = sides_[rank];
  std::vector<const char*> inputs;
  for (size_t source = 0; source < sides_.size(); ++source) {
    inputs.push_back(InputOf(static_cast<int>(source), rank * slot_bytes));
    if (inputs.back() == nullptr) return {};
  }
  return ReduceInOrder(side.in.tensor.scalar_type(), op_, inputs,
                       slot_bytes == 0 ? side.in.bytes : slot_bytes);
}

std::vector<char> Operation::Compute(int rank) {
  const Side& side = sides_[rank];
  if (side.out.bytes == 0) return {};
  const size_t slot = side.in.bytes / sides_.size();
  std::vector<char> result;
  switch (side.call->collective) {
    case Collective::kReduceScatter:
      return ComputeSum(rank, slot);
    case Collective::kAllReduce:
      return ComputeSum(rank, 0);
    case Collective::kBroadcast: {
      const char* const data = InputOf(root_, 0);
      if (data != nullptr) result.assign(data, data + side.out.bytes);
      return result;
    }
    default:
      break;
  }
  const bool gathers = side.call->collective == Collective::kAllGather;
  const size_t bytes = gathers ? side.in.bytes : slot;
  for (size_t source = 0; source < sides_.size(); ++source) {
    const char* const data =
        InputOf(static_cast<int>(source), gathers ? 0 : rank * slot);
    if (data != nullptr) result.insert(result.end(), data, data + bytes);
  }
  return result;
}

void Operation::ReadFor(int rank) {
  for (size_t source = 0; source < sides_.size(); ++source) {
    Side& side = sides_[source];
    if (!Reads(rank, static_cast<int>(source)) || !side.taken.empty()) continue;
    ++side.reads;
    MaybeDone(static_cast<int>(source));
  }
}

// In memory that all ranks see at once, the inputs may be the output.
bool Operation::IsThereAlready(const Side& side) const {
  if (side.call->collective != Collective::kAllGather) return false;
  const char* place = side.out.data;
  for (const Side& source : sides_) {
    if (source.in.data != place) return false;
    place += source.in.bytes;
  }
  return true;
}

void Operation::WriteTo(int rank, std::vector<char> result) {
  Side& side = sides_[rank];
  if (side.cancelled) return;
  if (side.in_front != nullptr &&
      side.in_front->SumsInto(rank, side.out.data)) {
    context_.simulation->After(absl::Microseconds(10),
                               [self = shared_from_this(), rank, result] {
                                 self->WriteTo(rank, result);
                               });
    return;
  }
  CheckMemory(rank, side.out);
  if (!side.cancelled) CheckMemory(rank, side.in);
  if (side.cancelled) return;
  CheckInput(rank, "while that ran");
  const bool stays = side.in_place && side.reads < sides_.size();
  if (stays && side.taken.empty()) side.taken = side.before;
  if (side.scaled && side.out.bytes > 0) {
    if (side.in_front != nullptr) {
      side.before.assign(side.out.data, side.out.data + side.out.bytes);
    }
    result = ScaleInto(side.in.tensor.scalar_type(), result, *side.scaled,
                       side.out.tensor.scalar_type(), side.before);
  }
  side.in_front.reset();
  if (!IsThereAlready(side)) {
    std::copy(result.begin(), result.end(), side.out.data);
  }
  context_.memories->Delivered(context_.processes[rank], side.out.data,
                               result.size());
  side.in_hash = HashInput(rank);
  side.has_result = true;
  MaybeDone(rank);
}

void Operation::MaybeDone(int rank) {
  Side& side = sides_[rank];
  const bool is_broadcast = side.call->collective == Collective::kBroadcast;
  const bool is_read = side.reads >= sides_.size() || !side.taken.empty() ||
                       (is_broadcast && rank != root_);
  if (!side.has_result || !is_read || side.done || side.cancelled) return;
  CheckMemory(rank, side.in);
  if (side.cancelled) return;
  CheckInput(rank, "before that was done");
  if (side.call->collective == Collective::kReduceScatter &&
      context_.options->overwrites_inputs &&
      !context_.memories->Contains(side.in.data)) {
    OverwriteInput(side);
  }
  side.done = true;
}

void Operation::Drop(int rank) {
  Side& side = sides_[rank];
  if (side.done || side.cancelled) return;
  CheckInput(rank, "while that ran");
  side.may_write = side.call->collective == Collective::kAllGather ||
                   side.call->collective == Collective::kAllToAll;
  side.may_write &= !side.in_place && !IsSlice(side);
}

void Operation::CheckInput(int rank, absl::string_view when) {
  const Side& side = sides_[rank];
  if (HashInput(rank) == side.in_hash) return;
  if (side.may_write && !is_awaited_) {
    spoilt_by_ = rank;
    return;
  }
  Violation(rank, absl::StrCat("rank ", rank, " has changed the input of ",
                               comm::Name(*side.call, sequence_), " ", when));
}

void Operation::Acquire(int rank) {
  is_awaited_ = true;
  if (spoilt_by_) {
    Violation(rank, absl::StrCat("rank ", rank, " has waited for ",
                                 comm::Name(*sides_[rank].call, sequence_),
                                 ", whose input rank ", *spoilt_by_,
                                 " has changed after dropping it"));
  }
  for (const Side& side : sides_) {
    context_.memories->Acquire(context_.processes[rank], side.clock);
  }
}

}  // namespace fsdp::simulation
