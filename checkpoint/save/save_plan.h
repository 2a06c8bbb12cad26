// Which bytes of which files each rank writes. Follows from names, dtypes,
// shapes and ranges: no messages.
#ifndef CHECKPOINT_SAVE_SAVE_PLAN_H_
#define CHECKPOINT_SAVE_SAVE_PLAN_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/run/tensor_parts.h"

namespace fsdp::checkpoint {

struct SaveFile {
  std::string name;  // relative: "optimizer/exp_avg.safetensors"
  std::string head;  // the bytes it begins with
  int64_t bytes = 0;
};

// One of these bytes.
SaveFile WholeFile(std::string name, std::string bytes);

// What this rank writes of one tensor: never empty.
struct SaveRange {
  int64_t file = 0;  // in SavePlan::files, or, from their number on, in `own`
  int64_t offset = 0;
  int64_t bytes = 0;
  at::Tensor values;  // 1-D, on any device; may rest elsewhere
  c10::ScalarType dtype = c10::kFloat;  // in the file
  std::string name;                     // of the tensor, for errors
};

struct SavePlan {
  // On all ranks alike: ranks write them together, rank 0 the heads.
  std::vector<SaveFile> files;
  std::vector<SaveFile> own;         // of this rank alone
  std::vector<SaveRange> ranges;     // this rank's, in the order of `groups`
  std::vector<std::string> folders;  // of those files, relative; each once
  std::string text;                  // what ranks have to agree on, by lines

  int64_t BytesOfRanges() const;
  // What this rank writes, which is `rank`.
  int64_t BytesToWrite(int rank) const;
};

// InvalidArgument unless `name` can be one of the texts beside a model's files,
// such as "config.json". `option`: where the user gave it, for the error.
absl::Status CheckTextName(absl::string_view option, absl::string_view name);

// Each of `groups` is a Hugging Face model by its stem: the files, and an index
// where there are several. `texts`: further files of rank 0, by name; other
// ranks pass the same names, with any text.
absl::StatusOr<SavePlan> PlanSave(
    absl::Span<const TensorGroup> groups,
    const std::map<std::string, std::string>& texts, int64_t max_file_bytes);

// The same in own files of each rank (PlanShardFiles()), "model" as
// "shard-00003-model-00001-of-00002.safetensors", whose ranges are in the order
// of their files. `texts` are own ones of rank 0.
absl::StatusOr<SavePlan> PlanSavePerRank(
    absl::Span<const TensorGroup> groups,
    const std::map<std::string, std::string>& texts, int rank);

// Files of a plan, straight from where their bytes are.

// The first files of the writer are the plan's `files`, and `own` the next.

// Makes all of `files` as large as they will be, and writes what they begin
// with: what rank 0 does.
absl::Status WriteHeads(const SavePlan& plan, RangeWriter& writer);

// Writes what this rank's own files begin with.
absl::Status WriteOwnHeads(const SavePlan& plan, RangeWriter& writer);

// Writes all of `plan.ranges` while they are read; values that rest elsewhere
// are in memory one unit at a time.
absl::Status WriteLive(const SavePlan& plan, RangeWriter& writer);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVE_PLAN_H_
