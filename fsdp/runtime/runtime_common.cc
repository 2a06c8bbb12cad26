#include "fsdp/runtime/runtime_common.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
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

std::vector<std::vector<std::string>> LabelsOf(
    absl::Span<const RuntimeUnit> units) {
  std::vector<std::vector<std::string>> labels;
  for (const RuntimeUnit& unit : units) labels.push_back(LabelsOf(unit));
  return labels;
}

}  // namespace

RuntimeCommon::RuntimeCommon(Group communicator, std::vector<RuntimeUnit> units,
                             absl::Duration timeout)
    : communicator_(std::move(communicator)),
      units_(std::move(units)),
      labels_(LabelsOf(absl::MakeConstSpan(units_))),
      timeout_(timeout),
      device_(DeviceOf(units_)) {}

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
