#include "fsdp/kept_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "offload/file_store.h"
#include "offload/transfer.h"

namespace fsdp {
namespace {

using offload::FileStore;
using offload::FileStoreOptions;

absl::StatusOr<int64_t> StageIn(FileStore& store, absl::Time deadline) {
  char bytes[sizeof(int64_t)];
  absl::StatusOr<std::unique_ptr<offload::Transfer>> read =
      store.Read(kStageRegion, 0, absl::MakeSpan(bytes));
  if (absl::IsNotFound(read.status())) return 0;
  FSDP_RETURN_IF_ERROR(read.status());
  FSDP_RETURN_IF_ERROR((*read)->Wait(deadline));
  int64_t stage;
  std::memcpy(&stage, bytes, sizeof(stage));
  return stage;
}

// The least stage of all files of all ranks, and the greatest.
struct Stages {
  int64_t least;
  int64_t greatest;
};

// The last commit of each.
absl::StatusOr<KeptFiles> OpenLast(const std::vector<FileStoreOptions>& files,
                                   absl::Duration timeout, Stages& stages) {
  KeptFiles kept;
  stages = {std::numeric_limits<int64_t>::max(), 0};
  for (const FileStoreOptions& file : files) {
    absl::StatusOr<std::unique_ptr<FileStore>> store = FileStore::Reopen(file);
    if (absl::IsNotFound(store.status())) store = FileStore::Make(file);
    FSDP_RETURN_IF_ERROR(store.status());
    FSDP_ASSIGN_OR_RETURN(const int64_t stage,
                          StageIn(**store, absl::Now() + timeout));
    stages.least = std::min(stages.least, stage);
    stages.greatest = std::max(stages.greatest, stage);
    kept.stores.push_back(*std::move(store));
  }
  return kept;
}

// Reopens what is ahead of `kept.stage`.
absl::Status GoBack(const std::vector<FileStoreOptions>& files,
                    absl::Duration timeout, KeptFiles& kept) {
  for (size_t i = 0; i < files.size(); ++i) {
    std::unique_ptr<FileStore>& store = kept.stores[i];
    const absl::Time deadline = absl::Now() + timeout;
    FSDP_ASSIGN_OR_RETURN(const int64_t last, StageIn(*store, deadline));
    if (last == kept.stage) continue;
    const int64_t commit = store->commit();
    store.reset();  // a file is open once
    FSDP_ASSIGN_OR_RETURN(store, FileStore::Reopen(files[i], commit - 1));
    FSDP_ASSIGN_OR_RETURN(const int64_t stage, StageIn(*store, deadline));
    if (stage == kept.stage) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the kept file ", files[i].directory, "/", files[i].name,
        " is of stages ", last, " and ", stage, ", and another one of ",
        kept.stage,
        ": they are not of one run, or some were replaced; remove the run's "
        "files to begin anew"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Stages> StagesOverRanks(comm::Communicator& world, Stages mine,
                                       absl::Time deadline) {
  const at::Tensor numbers =
      at::tensor({-mine.least, mine.greatest}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        world.AllReduce(numbers, comm::ReduceOp::kMax,
                                        "the stage that kept files are of"));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  const int64_t* const data = numbers.const_data_ptr<int64_t>();
  return Stages{-data[0], data[1]};
}

// Before anything is given up.
absl::Status CheckOneRun(const Stages& stages) {
  if (stages.greatest - stages.least <= 1) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the kept files are of steps from ", StepOfStage(stages.least), " to ",
      StepOfStage(stages.greatest),
      ": they are not of one run, or some were lost or replaced (0: a new "
      "file); find them, or remove the run's files to begin anew"));
}

}  // namespace

absl::StatusOr<KeptFiles> OpenKeptFiles(
    const std::vector<FileStoreOptions>& files, comm::Communicator& world,
    absl::Duration timeout) {
  constexpr char kWhat[] = "opening kept files";
  Stages stages;
  absl::StatusOr<KeptFiles> kept = OpenLast(files, timeout, stages);
  FSDP_RETURN_IF_ERROR(
      comm::Agree(world, kept.status(), kWhat, absl::Now() + timeout));
  FSDP_ASSIGN_OR_RETURN(stages,
                        StagesOverRanks(world, stages, absl::Now() + timeout));
  FSDP_RETURN_IF_ERROR(CheckOneRun(stages));
  kept->stage = stages.least;
  const absl::Status gone_back = GoBack(files, timeout, *kept);
  FSDP_RETURN_IF_ERROR(
      comm::Agree(world, gone_back, kWhat, absl::Now() + timeout));
  return kept;
}

}  // namespace fsdp
