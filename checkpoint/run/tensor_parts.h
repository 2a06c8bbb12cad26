// What this rank writes of the tensors of a run: one range of each.
#ifndef CHECKPOINT_RUN_TENSOR_PARTS_H_
#define CHECKPOINT_RUN_TENSOR_PARTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/tensor/tensor_info.h"
#include "comm/communicator.h"

// Ranks that save or load together, or a process that does alone.

namespace fsdp::checkpoint {

// What `act` returns, or, as a Status, what it throws: ranks that agree on it
// must not lose one. `what` it does, for errors.
absl::Status Caught(absl::string_view what,
                    absl::FunctionRef<absl::Status()> act);

class Together {
 public:
  // `ranks` outlives it; null: alone. `what` they do, for errors: "exporting a
  // model". `timeout`: of each call.
  Together(comm::Communicator* ranks, absl::string_view what,
           absl::Duration timeout)
      : ranks_(ranks), what_(what), timeout_(timeout) {}

  // Null: alone.
  comm::Communicator* ranks() const { return ranks_; }
  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  absl::Time Deadline() const;

  // Collective: OK where it is OK on all ranks; otherwise one rank's error, on
  // all, "rank 2: " in front. Alone: `mine`.
  absl::Status Agree(const absl::Status& mine) const;
  // Collective: InvalidArgument on all ranks, naming the first line that
  // differs, where they do not pass the same. `of`: what it says.
  absl::Status CheckSame(const std::string& text, absl::string_view of) const;

 private:
  comm::Communicator* const ranks_;
  const std::string what_;
  const absl::Duration timeout_;
};

// The files of TrainingRun::average.
inline constexpr char kAverageStem[] = "average";

struct TensorPart {
  TensorInfo info;    // of the whole, as it is in the file
  int64_t begin = 0;  // row-major, in elements
  at::Tensor values;  // 1-D; of any dtype that can be cast; maybe resting
};

// Tensors that make a set of files together.
struct TensorGroup {
  std::string stem;  // of the files' names: "model", "optimizer/exp_avg"
  std::vector<TensorPart> parts;
};

// The name in the files of a parameter or buffer of the model; nothing: it is
// left out.
using NamesInFiles =
    std::function<std::optional<std::string>(const std::string& name)>;

struct PartOptions {
  // Of floating-point parameters and buffers; unset: their own.
  std::optional<c10::ScalarType> model_dtype = std::nullopt;
  // Of the files of the model: "adapter_model".
  std::string model_stem = "model";
  // Null: all, by their names.
  NamesInFiles names = nullptr;
};

// Whether PartsToWrite() is collective: a parameter's storage is not row-major.
// Ranks agree.
bool IsCollective(const RunValues& values);
// Before that, where IsCollective(): InvalidArgument on all ranks if their
// options or the states of their optimizers differ: they would wait for each
// other. No message otherwise.
absl::Status CheckSameParts(const Together& together, const RunValues& values,
                            const PartOptions& options);

// All ranks get equal infos in equal order, and ranges that cover each tensor
// once, cut evenly: what several ranks hold is shared out among them. What is
// whole on every rank is rank 0's. Tied parameters are there once, by their
// first name. Collective only where IsCollective().
// InvalidArgument: a dtype that no file has or a layout other than strided,
// naming the tensor; a model_dtype that is not of floating point; two tensors
// of one name in the files.
absl::StatusOr<std::vector<TensorGroup>> PartsToWrite(
    const RunValues& values, int rank, const PartOptions& options);

// Dtypes of LibTorch as files name them.

// Nothing where the other side has none: quantized and packed dtypes of
// LibTorch, sub-byte ones of files.
std::optional<Dtype> FileDtype(c10::ScalarType dtype);
std::optional<c10::ScalarType> TorchDtype(Dtype dtype);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TENSOR_PARTS_H_
