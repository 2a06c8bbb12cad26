#include "fsdp/runtime/runtime_common.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/device_streams.h"
#include "base/torch_status.h"

namespace fsdp {
namespace {

c10::Device DeviceOf(absl::Span<const RuntimeUnit> units) {
  for (const RuntimeUnit& unit : units) {
    if (!unit.flats.empty()) return unit.flats.front()->shard().device();
  }
  return at::kCPU;
}

std::vector<std::string> LabelsOf(const RuntimeUnit& unit) {
  std::vector<std::string> labels;
  for (const RuntimeFlat& parameter : unit.flats) {
    std::string label = unit.name;
    if (unit.flats.size() > 1) {
      absl::StrAppend(&label, "/", c10::toString(parameter->dtype()));
      if (parameter->compute_dtype() != parameter->dtype()) {
        absl::StrAppend(&label, " in ",
                        c10::toString(parameter->compute_dtype()));
      }
    }
    if (std::find(labels.begin(), labels.end(), label) != labels.end()) {
      absl::StrAppend(&label, " from ", parameter->parameter(0).name, " on");
    }
    labels.push_back(std::move(label));
  }
  return labels;
}

using UnitName = std::function<std::string(int unit)>;

std::string TextOf(const Action& action, const UnitName& name) {
  return absl::StrCat(Name(action.kind), " of ", name(action.unit));
}

std::string DifferenceOf(const StepRecord& before, const StepRecord& after,
                         const UnitName& name) {
  const std::string text = TextOf(after.action, name);
  if (!(before.action == after.action)) {
    return absl::StrCat(text, ": the step before did ",
                        TextOf(before.action, name));
  }
  if (after.read_flags) {
    return absl::StrCat(
        text,
        ": this rank has no gradient of one of its parameters, and the host "
        "asks the device whether another rank has one");
  }
  const auto moved = [&](const char* what) {
    return absl::StrCat(text, ": ", what,
                        " lies elsewhere than in the step before");
  };
  if (before.gathered != after.gathered) return moved("what is gathered");
  if (before.reduced != after.reduced) return moved("what is reduced");
  return "";
}

const char* NameOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kGather:
      return "all-gather ";
    case ActionKind::kReduce:
      return "reduce-scatter ";
    default:
      return "all-reduce ";
  }
}

}  // namespace

std::string DifferenceOf(const StepLog& before, const StepLog& after,
                         const UnitName& name) {
  const size_t common = std::min(before.size(), after.size());
  for (size_t i = 0; i < common; ++i) {
    std::string difference = DifferenceOf(before[i], after[i], name);
    if (!difference.empty()) return difference;
  }
  if (before.size() == after.size()) return "";
  if (before.size() > common) {
    return absl::StrCat("only the step before did ",
                        TextOf(before[common].action, name));
  }
  return absl::StrCat("the step before did no ",
                      TextOf(after[common].action, name));
}

void OrderLog::Add(ActionKind kind, int unit, const std::string& label,
                   int64_t bytes, c10::ScalarType dtype) {
  const auto mix = [this](uint64_t value) {
    hash_ = (hash_ ^ value) * 0x100000001b3;
  };
  mix(static_cast<uint64_t>(kind));
  mix(static_cast<uint64_t>(unit));
  mix(static_cast<uint64_t>(bytes));
  mix(static_cast<uint64_t>(dtype));
  ++count_;
  if (first_.size() < kKept) first_.push_back({kind, &label, bytes, dtype});
}

void OrderLog::Clear() {
  hash_ = kNothing;
  count_ = 0;
  first_.clear();
}

std::string OrderLog::ToString() const {
  std::string text;
  for (const Entry& entry : first_) {
    absl::StrAppend(&text, NameOf(entry.kind), *entry.label, ", ", entry.bytes,
                    " bytes ", c10::toString(entry.dtype), "\n");
  }
  if (count_ > first_.size()) {
    absl::StrAppend(&text, "and ", count_ - first_.size(), " more\n");
  }
  return text;
}

RuntimeCommon::RuntimeCommon(Group communicator, std::vector<RuntimeUnit> units,
                             absl::Duration timeout)
    : communicator_(std::move(communicator)),
      units_(std::move(units)),
      timeout_(timeout),
      device_(DeviceOf(units_)) {
  for (const RuntimeUnit& unit : units_) labels_.push_back(LabelsOf(unit));
}

absl::Status RuntimeCommon::Await(comm::Work& work) const {
  return HasStreams(device_) ? work.BlockCurrentStream()
                             : work.Wait(Deadline());
}

void RuntimeCommon::Forget(std::unique_ptr<comm::Work>& work) const {
  if (work != nullptr && HasStreams(device_)) {
    TorchToStatus("forgetting a collective", [&] {
      work->BlockCurrentStream().IgnoreError();
    }).IgnoreError();
  }
  work.reset();
}

// Memory that a group allocates serves its own collectives best. Buffers move
// between units, so if the units have several groups, the group of all ranks
// allocates. Shards and their gradients, at the other end of these collectives,
// are ordinary memory: NCCL's fastest kernels, which are used from 2.29.7 on
// because they can be aborted from there on, need only one end in a window.
BufferPool::Allocate RuntimeCommon::AllocateBy(
    const Group& (*group_of)(const Placement&)) const {
  Group group;
  for (const RuntimeUnit& unit : units_) {
    const Group& of_unit = group_of(unit.placement);
    if (unit.flats.empty() || of_unit->world_size() == 1) continue;
    if (group != nullptr && group != of_unit) {
      group = communicator_;
      break;
    }
    group = of_unit;
  }
  if (group == nullptr) group = communicator_;
  return [group](int64_t bytes) { return group->AllocateSymmetric(bytes); };
}

}  // namespace fsdp
