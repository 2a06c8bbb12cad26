// Plans which bytes of which files each rank writes, without messages: the plan
// follows from names, dtypes, shapes and ranges.
#ifndef CHECKPOINT_SAVE_SAVE_PLAN_H_
#define CHECKPOINT_SAVE_SAVE_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/run/run_values.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// A range that this rank writes, which is never empty. Files are those of
// SavePlan::files, and then, numbered on, those of `own`.
struct SaveRange : FilePlace {
  TensorRange range;
};

// Names of files are relative: "optimizer/exp_avg.safetensors".
struct SavePlan {
  // The same on all ranks, which write them together; rank 0 writes the
  // headers.
  std::vector<PlannedFile> files;
  std::vector<PlannedFile> own;   // files of this rank alone
  std::vector<SaveRange> ranges;  // this rank's, in the order of `groups`
  std::string text;               // all that ranks must agree on, by lines

  // Adds files of this rank alone, by name.
  void Add(const std::map<std::string, std::string>& texts);

  int64_t BytesOfRanges() const;
  // The bytes that this rank, which is `rank`, writes.
  int64_t BytesToWrite(int rank) const;
};

// InvalidArgument unless `name` can be one of the texts beside a model's files,
// such as "config.json". `option` says in the error where the user gave it.
absl::Status CheckTextName(absl::string_view option, absl::string_view name);

// Plans files that ranks write together: for each of `groups` a Hugging Face
// model of its stem, with an index if it has several files.
absl::StatusOr<SavePlan> PlanSave(absl::Span<const TensorGroup> groups,
                                  int64_t max_file_bytes);

// Plans files that each rank writes alone (PlanShardFiles()): instead of
// "model" for example "shard-00003-model-00001-of-00002.safetensors". The
// ranges are in the order of these files.
absl::StatusOr<SavePlan> PlanSavePerRank(absl::Span<const TensorGroup> groups,
                                         int rank);

// These write a plan. The files of `writer` are the plan's `files`, then `own`.

// Writes the headers of the files of this rank, which is `rank`. Rank 0 gives
// all of `files` their size.
absl::Status WriteHeaders(const SavePlan& plan, int rank, RangeWriter& writer);

// Reads bytes of a range from `position` on.
using ReadBytes =
    absl::FunctionRef<absl::Status(int64_t position, absl::Span<char> out)>;
// Calls `use` with the place of each of `plan.ranges`, in their order, and what
// reads it, during the call. Values that rest elsewhere come into memory one
// unit at a time.
absl::Status ForEachRange(
    const SavePlan& plan,
    absl::FunctionRef<absl::Status(const FilePlace& place, ReadBytes read)>
        use);

// Writes all of `plan.ranges` from where the values are.
absl::Status WriteLive(const SavePlan& plan, RangeWriter& writer);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVE_PLAN_H_
