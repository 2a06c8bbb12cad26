// The tensors of a run by name, where they are: from them follows what this
// rank writes and reads of each. Each rank also has values in a file of its
// own.
#ifndef CHECKPOINT_RUN_RUN_VALUES_H_
#define CHECKPOINT_RUN_RUN_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/torch_status.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// Returns the ranks of a model that FullyShard() has returned, and `otherwise`
// for one that is not sharded.
comm::Communicator* RanksOf(torch::nn::Module& module,
                            comm::Communicator* otherwise = nullptr);

// Returns the model behind a module that FullyShard() has returned, otherwise
// null. `module` may be null.
ShardedModel* ShardedOf(torch::nn::Module* module);

// Ranks that save or load together, or a process that does so alone.
struct Together {
  comm::Communicator* ranks = nullptr;  // null: alone
  // Limits each wait for an answer of other ranks.
  absl::Duration timeout = absl::InfiniteDuration();

  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
  int world_size() const { return ranks == nullptr ? 1 : ranks->world_size(); }
  absl::Time Deadline() const { return absl::Now() + timeout; }

  // Returns OK if `mine` is OK on all ranks, otherwise one rank's error on all,
  // "rank 2: " in front. Collective. Alone: `mine`. `what` says what they do:
  // "exporting a model".
  absl::Status Agree(const absl::Status& mine, absl::string_view what) const {
    if (ranks == nullptr) return mine;
    return comm::Agree(*ranks, mine, what, Deadline());
  }
  // Does the same with what `act`, which may throw, returns.
  template <typename Fn>
  absl::Status Act(absl::string_view what, const Fn& act) const {
    return Agree(TorchToStatus(what, act), what);
  }
  // InvalidArgument on all ranks, naming the first line that differs, unless
  // all pass the same text. Collective. `of` says what the text describes.
  absl::Status CheckSame(const std::string& text, absl::string_view of) const {
    if (ranks == nullptr) return absl::OkStatus();
    return comm::CheckSame(*ranks, text, of, Deadline());
  }
  // Returns rank 0's text on all ranks. Collective.
  absl::StatusOr<std::string> Share(const std::string& text,
                                    absl::string_view what) const {
    if (ranks == nullptr) return text;
    return comm::BroadcastString(*ranks, text, /*root=*/0, what, Deadline());
  }
};

// While it lives, all others are refused access to a sharded model.
class RunValues {
 public:
  // Reads the run of this rank, without messages. `what` names the caller in
  // errors. InvalidArgument: there is no model; it has sharded modules inside
  // without being one, or is inside one; the optimizer is of another class or
  // has other parameters. FailedPrecondition: inside a forward, a backward or
  // WeightAverage::InModel().
  static absl::StatusOr<RunValues> Read(const TrainingRun& run,
                                        absl::string_view what);
  // Does the same for a run that is only a model.
  static absl::StatusOr<RunValues> ReadModel(torch::nn::Module* model,
                                             absl::string_view what);

  // Null if the model is not sharded.
  ShardedModel* sharded() const { return sharded_; }
  // InvalidArgument: the model is sharded over other ranks than these.
  absl::Status CheckRanks(const Together& together) const;
  // See ShardedModel::CheckLoaded().
  absl::Status CheckLoaded() const {
    return sharded_ == nullptr ? absl::OkStatus() : sharded_->CheckLoaded();
  }
  // The device on which the model computes; the CPU if it has no parameters.
  c10::Device device() const;
  // Names are without wrappers.
  const ModelValues& model() const { return model_; }
  // The averages of model().parameters() that TrainingRun::average has, in
  // their order. Unset if the run has no average.
  const std::optional<std::vector<TensorRange>>& averages() const {
    return averages_;
  }
  // Null if the run has no optimizer.
  const OptimizerValues* optimizer() const {
    return optimizer_.has_value() ? &*optimizer_ : nullptr;
  }
  // Returns the states of optimizer() by parameter, and forgets them.
  std::map<std::string, OptimizerSlots> ReleaseStates() {
    return std::exchange(optimizer_->slots, {});
  }

 private:
  RunValues() = default;
  absl::Status ReadPlain(const torch::nn::Module& module);

  ShardedModel* sharded_ = nullptr;
  std::optional<WholeAccess> access_;
  ModelValues model_;
  std::optional<std::vector<TensorRange>> averages_;
  std::optional<OptimizerValues> optimizer_;
};

// The stem of the files of TrainingRun::average.
inline constexpr char kAverageStem[] = "average";

// Tensors that make up a set of files.
struct TensorGroup {
  std::string stem;  // of the files' names: "model", "optimizer/exp_avg"
  // Row-major, by the names that the files have; file_dtype() is one that
  // files have.
  std::vector<TensorRange> parts;
};

// Returns what a file says of the whole tensor of such a part.
TensorInfo InfoOf(const TensorRange& part);

struct PartOptions {
  // The dtype of floating-point parameters and buffers; unset: their own.
  std::optional<c10::ScalarType> model_dtype = std::nullopt;
  // The names of the model's files begin with it: "adapter_model".
  std::string model_stem = "model";
  // Returns the name in the files of a parameter or buffer of the model, or
  // nothing to leave it out. If null, all are written by their own names.
  std::function<std::optional<std::string>(const std::string& name)> names =
      nullptr;
};

// Returns whether PartsToWrite() is collective, which it is if the storage of a
// parameter is not row-major; not for null, a model that is not sharded. The
// answer is the same on all ranks, whatever state they are in.
bool IsCollective(const ShardedModel* sharded);
// To be called before PartsToWrite(). If that is collective, InvalidArgument on
// all ranks: their options or optimizer states differ, so that they would wait
// for each other. Otherwise no message is sent.
absl::Status CheckSameParts(const Together& together, const RunValues& values,
                            const PartOptions& options);

// Returns this rank's parts. All ranks get equal tensors in equal order, and
// ranges that together cover each tensor once: what several ranks hold is
// shared out evenly, and what is whole on every rank is rank 0's. A tied
// parameter appears once, by its first name. Collective only if IsCollective().
// InvalidArgument: a tensor, which is named, has a dtype that no file has or is
// not strided; model_dtype is not floating-point; two tensors have one name in
// the files.
absl::StatusOr<std::vector<TensorGroup>> PartsToWrite(
    const RunValues& values, int rank, const PartOptions& options);

// The values that belong to one rank and not to the model, in a file per rank.

// "ranks/rank-00002.safetensors" holds what TakeRankValues() returns,
// "ranks/buffers-00002.safetensors" what TakeWholeValues() returns.
std::string RankFileName(int rank);
std::string BuffersFileName(int rank);

// A small safetensors file in memory: named tensors, and texts as its metadata.
struct SmallFile {
  std::map<std::string, at::Tensor> tensors;  // on the CPU
  std::map<std::string, std::string> texts;
};

// Returns the bytes of the file. InvalidArgument: safetensors has no such
// dtype, or a text is not UTF-8.
absl::StatusOr<std::string> Format(const SmallFile& file);
absl::StatusOr<SmallFile> ParseSmallFile(absl::string_view bytes);

// Returns the states of the random generators of `device` and of the CPU, and
// the entries of this rank.
SmallFile TakeRankValues(const TrainingRun& run, c10::Device device);
// Puts them back, except for states of another device. Throws what LibTorch
// throws of a state that a generator refuses.
void RestoreRankValues(const SmallFile& file, c10::Device device,
                       TrainingRun& run);

// Returns the values of buffers and of parameters that are not sharded, which
// may differ between ranks, copied to the CPU in the dtypes that they have
// without mixed precision.
SmallFile TakeWholeValues(const ModelValues& model);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RUN_VALUES_H_
