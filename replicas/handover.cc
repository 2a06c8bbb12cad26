#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/state/optimizer_values.h"
#include "ranges/tensor_range.h"
#include "replicas/column.h"

namespace fsdp::replicas {
namespace {

using checkpoint::RunValues;
using checkpoint::TrainingRecord;
using checkpoint::TrainingRun;

constexpr char kWhat[] = "handing a run over to a replica";

// Bytes of the broadcasts under way at a time; a single one may be larger.
constexpr int64_t kMostInFlight = int64_t{64} << 20;

// Describes shards and buffers: equal texts can be copied to each other.
std::string LayoutOf(const RunValues& values) {
  std::string text;
  for (const TensorRange& range : values.model().all) {
    absl::StrAppend(
        &text, range.name, ": ", toString(range.values.scalar_type()), " of [",
        absl::StrJoin(range.sizes, ", "), "], ",
        range.is_whole
            ? LayoutText(range.values)
            : absl::StrCat("elements ", range.begin, " to ", range.end()),
        "\n");
  }
  return text;
}

// A state tensor of the optimizer, such as exp_avg.
struct Slot {
  std::string name;
  c10::ScalarType dtype;
};
using SlotsByParameter = std::map<std::string, std::vector<Slot>>;

std::string FormatSlots(const OptimizerValues* optimizer) {
  std::string text;
  if (optimizer == nullptr) return text;
  for (const auto& [parameter, slots] : optimizer->slots) {
    for (const auto& [name, tensor] : slots.tensors) {
      absl::StrAppend(&text, name, " ", static_cast<int>(tensor.scalar_type()),
                      " ", parameter, "\n");
    }
  }
  return text;
}

// Reads what FormatSlots() wrote on another rank.
absl::StatusOr<SlotsByParameter> ParseSlots(const std::string& text) {
  SlotsByParameter slots;
  for (const absl::string_view line :
       absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::MaxSplits(' ', 2));
    int dtype = 0;
    if (words.size() != 3 || !absl::SimpleAtoi(words[1], &dtype) || dtype < 0 ||
        dtype >= static_cast<int>(c10::ScalarType::NumOptions)) {
      return absl::InvalidArgumentError(
          absl::StrCat(kWhat, ": \"", line, "\" is no state of an optimizer"));
    }
    slots[words[2]].push_back({words[0], static_cast<c10::ScalarType>(dtype)});
  }
  return slots;
}

class Handover {
 public:
  Handover(comm::Communicator& ranks, int root, TrainingRun& run,
           absl::Time deadline)
      : ranks_(ranks), root_(root), run_(run), deadline_(deadline) {}

  absl::Status Run() {
    FSDP_RETURN_IF_ERROR(
        Agree(TorchToStatus(kWhat, [this] { return Read(); })));
    FSDP_RETURN_IF_ERROR(comm::CheckSame(ranks_, LayoutOf(*values_),
                                         "shards of ranks of the same number",
                                         deadline_));
    for (std::string* const text : {&record_text_, &slots_text_}) {
      FSDP_ASSIGN_OR_RETURN(
          *text, comm::BroadcastString(ranks_, *text, root_, kWhat, deadline_));
    }
    FSDP_RETURN_IF_ERROR(
        Agree(TorchToStatus(kWhat, [this] { return Plan(); })));
    // From here on ranks are filled: one that cannot go on tells the others.
    absl::Status status = TorchToStatus(kWhat, [this] { return Fill(); });
    if (!status.ok()) ranks_.Abort(status);
    return status;
  }

 private:
  struct Transfer {
    std::unique_ptr<comm::Work> work;
    Resident resident;
    at::Tensor values;
    at::Tensor dense;  // `values` if they are dense, else a dense copy
  };

  bool gives() const { return ranks_.rank() == root_; }

  absl::Status Agree(const absl::Status& mine) {
    return comm::Agree(ranks_, mine, kWhat, deadline_);
  }

  // --- Changes nothing ------------------------------------------------------

  absl::Status Read() {
    FSDP_ASSIGN_OR_RETURN(RunValues values,
                          RunValues::Read(run_, "HandOver()"));
    values_.emplace(std::move(values));
    for (const TensorRange& other : values_->model().others()) {
      FSDP_RETURN_IF_ERROR(CheckCanBeSent(other.name, other.values));
    }
    if (!gives()) return absl::OkStatus();
    slots_text_ = FormatSlots(values_->optimizer());
    FSDP_ASSIGN_OR_RETURN(
        record_text_,
        ToText(checkpoint::RecordOf(run_, values_->optimizer(), /*step=*/0,
                                    /*world_size=*/1)));
    return absl::OkStatus();
  }

  absl::Status Plan() {
    FSDP_ASSIGN_OR_RETURN(record_, checkpoint::ParseTraining(record_text_));
    FSDP_ASSIGN_OR_RETURN(slots_, ParseSlots(slots_text_));
    FSDP_RETURN_IF_ERROR(CheckFits(record_, run_));
    if (gives() || run_.optimizer == nullptr) return absl::OkStatus();
    std::map<std::string, OptimizerSlots> planned;
    for (const TensorRange& leaf : values_->model().parameters()) {
      OptimizerSlots state = StateOf(leaf, c10::kMeta);
      if (!IsEmpty(state)) planned[leaf.name] = std::move(state);
    }
    FSDP_ASSIGN_OR_RETURN(
        replacement_,
        PlanReplacement(values_->model().parameters(), *run_.optimizer,
                        *values_->optimizer(), planned, *record_.groups));
    return absl::OkStatus();
  }

  // --- Writes ---------------------------------------------------------------

  // Copies the root's elements to `values` of the other ranks by the next
  // Flush(), beside other tensors that are under way.
  absl::Status Send(const at::Tensor& values, const std::string& label) {
    const auto count = static_cast<int64_t>(values.nbytes());
    if (count == 0) return absl::OkStatus();
    if (bytes_in_flight_ + count > kMostInFlight) {
      FSDP_RETURN_IF_ERROR(Flush());
    }
    Transfer transfer;
    const Use use = gives() ? Use::kRead : Use::kUpdate;
    absl::StatusOr<Resident> resident = Resident::Of(values, use);
    if (absl::IsResourceExhausted(resident.status()) && !in_flight_.empty()) {
      // What is under way may fill the memory in front of a store.
      FSDP_RETURN_IF_ERROR(Flush());
      resident = Resident::Of(values, use);
    }
    FSDP_ASSIGN_OR_RETURN(transfer.resident, std::move(resident));
    transfer.values = values.detach();
    transfer.dense = transfer.values.contiguous();
    FSDP_ASSIGN_OR_RETURN(
        transfer.work,
        ranks_.Broadcast(transfer.dense.view({-1}).view(c10::kByte), root_,
                         label));
    bytes_in_flight_ += count;
    in_flight_.push_back(std::move(transfer));
    return absl::OkStatus();
  }

  // Waits until everything under way has arrived.
  absl::Status Flush() {
    for (const Transfer& transfer : in_flight_) {
      FSDP_RETURN_IF_ERROR(transfer.work->Wait(deadline_));
      if (!gives() && !transfer.dense.is_same(transfer.values)) {
        transfer.values.copy_(transfer.dense);
      }
    }
    in_flight_.clear();
    bytes_in_flight_ = 0;
    return absl::OkStatus();
  }

  absl::Status Fill() {
    for (const TensorRange& range : values_->model().all) {
      if (!range.is_whole) {
        FSDP_RETURN_IF_ERROR(Send(range.values, range.name));
        continue;
      }
      // It may be expanded or sparse, hence its parts and distinct elements.
      for (const at::Tensor& part : PartsOf(range.values.detach())) {
        FSDP_RETURN_IF_ERROR(Send(DistinctOf(part), range.name));
      }
    }
    FSDP_RETURN_IF_ERROR(Flush());
    const bool has_average =
        run_.average != nullptr && record_.average.value_or(false);
    for (const TensorRange& leaf : values_->model().parameters()) {
      if (!has_average || !run_.average->Of(leaf.values).defined()) continue;
      FSDP_ASSIGN_OR_RETURN(const at::Tensor average,
                            run_.average->ToFill(leaf.values));
      FSDP_RETURN_IF_ERROR(Send(average, leaf.name));
    }
    FSDP_RETURN_IF_ERROR(Flush());
    if (run_.optimizer != nullptr) FSDP_RETURN_IF_ERROR(FillOptimizer());
    return gives() ? absl::OkStatus() : Restore(record_, run_);
  }

  std::vector<Slot> SlotsOf(const std::string& parameter) const {
    const auto found = slots_.find(parameter);
    return found == slots_.end() ? std::vector<Slot>() : found->second;
  }

  // Sends a few states at a time, so that states that rest on the CPU or an SSD
  // are never all in memory.
  absl::Status FillOptimizer() {
    std::map<std::string, OptimizerSlots> present = values_->ReleaseStates();
    if (!gives()) ApplyOptions(replacement_, *run_.optimizer);
    std::vector<at::Tensor> arriving;  // leaves
    for (const TensorRange& leaf : values_->model().parameters()) {
      if (bytes_in_flight_ > kMostInFlight / 2) {
        FSDP_RETURN_IF_ERROR(TakeUp(arriving));
      }
      if (gives()) {
        for (const Slot& slot : SlotsOf(leaf.name)) {
          FSDP_RETURN_IF_ERROR(
              Send(present.at(leaf.name).tensors.at(slot.name), leaf.name));
        }
      } else {
        present.erase(leaf.name);
        FSDP_RETURN_IF_ERROR(TakeState(leaf));
      }
      arriving.push_back(leaf.values);
    }
    return TakeUp(arriving);
  }

  // Waits for the states of these leaves, which may then go where they rest.
  absl::Status TakeUp(std::vector<at::Tensor>& arriving) {
    FSDP_RETURN_IF_ERROR(Flush());
    const std::vector<at::Tensor> leaves = std::exchange(arriving, {});
    return gives() ? absl::OkStatus() : TakeUpStates(*run_.optimizer, leaves);
  }

  static bool IsEmpty(const OptimizerSlots& state) {
    return state.numbers.empty() && state.tensors.empty();
  }

  // Returns the donor's state of `leaf`, with tensors that have no values yet.
  OptimizerSlots StateOf(const TensorRange& leaf, c10::Device device) const {
    OptimizerSlots state;
    const auto numbers = record_.numbers.find(leaf.name);
    if (numbers != record_.numbers.end()) state.numbers = numbers->second;
    for (const Slot& slot : SlotsOf(leaf.name)) {
      state.tensors[slot.name] =
          at::empty(leaf.values.sizes(),
                    leaf.values.options().dtype(slot.dtype).device(device));
    }
    return state;
  }

  absl::Status TakeState(const TensorRange& leaf) {
    const OptimizerSlots state = StateOf(leaf, leaf.values.device());
    if (IsEmpty(state)) return absl::OkStatus();
    for (const Slot& slot : SlotsOf(leaf.name)) {
      FSDP_RETURN_IF_ERROR(Send(state.tensors.at(slot.name), leaf.name));
    }
    return ApplyState(leaf.values, state, *run_.optimizer);
  }

  comm::Communicator& ranks_;
  const int root_;
  TrainingRun& run_;
  const absl::Time deadline_;
  std::optional<RunValues> values_;
  std::string record_text_;
  std::string slots_text_;
  TrainingRecord record_;
  SlotsByParameter slots_;
  OptimizerReplacement replacement_;
  std::vector<Transfer> in_flight_;
  int64_t bytes_in_flight_ = 0;
};

}  // namespace

absl::Status HandOver(comm::Communicator& ranks, int root, TrainingRun& run,
                      absl::Time deadline) {
  const NormalMode normal;
  return Handover(ranks, root, run, deadline).Run();
}

}  // namespace fsdp::replicas
