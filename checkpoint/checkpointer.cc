#include "checkpoint/checkpointer.h"

#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/files/file_system.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/saver.h"
#include "comm/agreement.h"
#include "comm/rank_activity.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "checkpoint";
constexpr char kTexts[] = "CheckpointerOptions::texts";

absl::Status CheckOptions(const CheckpointerOptions& options) {
  const bool by_manifest = options.commit_by == CommitBy::kManifest;
  if (by_manifest && options.layout != SaveLayout::kPerRank) {
    return absl::InvalidArgumentError(
        "CheckpointerOptions::commit_by is kManifest, which is for storage "
        "without random writes: set layout to SaveLayout::kPerRank");
  }
  if (by_manifest && options.overwrite) {
    return absl::InvalidArgumentError(
        "CheckpointerOptions::overwrite with commit_by kManifest: the old "
        "checkpoint could not stay until the new one is there; save another "
        "step, or remove that one");
  }
  for (const auto& [name, text] : options.texts) {
    FSDP_RETURN_IF_ERROR(CheckTextName(kTexts, name));
    if (name != kTrainingName && name != kManifestName) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(kTexts, ": a checkpoint has a ", name, " of its own"));
  }
  return absl::OkStatus();
}

SaveContext ContextOf(std::string folder, const CheckpointerOptions& options) {
  SaveContext context;
  context.files = &OrReal(options.files);
  context.root = std::move(folder);
  context.together.timeout = options.timeout;
  context.stall_timeout = options.stall_timeout;
  context.commit_by = options.commit_by;
  context.overwrite = options.overwrite;
  context.retention.keep_last = options.keep_last.value_or(0);
  context.retention.keep_every = options.keep_every.value_or(0);
  context.writer.in_order = options.layout == SaveLayout::kPerRank;
  return context;
}

class FolderCheckpointer final : public Checkpointer {
 public:
  FolderCheckpointer(std::string folder, const CheckpointerOptions& options)
      : options_(options), context_(ContextOf(std::move(folder), options)) {}
  ~FolderCheckpointer() override {
    const absl::Status status = Wait();
    if (!status.ok()) {
      TORCH_WARN("a checkpoint was not saved: ", std::string(status.message()));
    }
  }

  const std::string& folder() const override { return context_.root; }

  // Call it first.
  absl::Status Begin(const std::shared_ptr<comm::Communicator>& ranks) {
    if (ranks != nullptr) {
      // Saves run on a thread of their own, beside the ranks' other calls.
      FSDP_ASSIGN_OR_RETURN(ranks_, ranks->Split(/*color=*/0, ranks->rank()));
      context_.together.ranks = ranks_.get();
      // Ranks with different answers would send different messages.
      FSDP_RETURN_IF_ERROR(together_.CheckSame(
          absl::StrCat(static_cast<int>(options_.commit_by)),
          "CheckpointerOptions::commit_by"));
    }
    constexpr char kOpening[] = "opening a folder of checkpoints";
    FSDP_RETURN_IF_ERROR(together_.Agree(CheckOptions(options_), kOpening));
    absl::Status claimed;
    if (together_.rank() == 0) {
      auto folder = CheckpointFolder::Claim(*context_.files, context_.root,
                                            options_.commit_by);
      claimed = folder.status();
      if (folder.ok()) {
        folder_ = *std::move(folder);
        const auto left = LatestCheckpoint(*context_.files, context_.root);
        claimed = left.status();
        if (left.ok() && left->has_value()) left_ = (*left)->step;
      }
      context_.folder = folder_.get();
    }
    FSDP_RETURN_IF_ERROR(together_.Agree(claimed, kOpening));
    std::string text;
    if (folder_ != nullptr) text = absl::StrCat(left_, " ", folder_->token());
    FSDP_ASSIGN_OR_RETURN(text, together_.Share(text, kLabel));
    const std::vector<std::string> parts = absl::StrSplit(text, ' ');
    FSDP_CHECK(parts.size() == 2 && absl::SimpleAtoi(parts[0], &left_));
    context_.token = parts[1];
    return absl::OkStatus();
  }

  absl::Status Save(int64_t step, const TrainingRun& run) override {
    const comm::PhaseScope phase(Activity(), comm::Phase::kCheckpoint,
                                 "saving");
    FSDP_RETURN_IF_ERROR(Start(step, run, "Save()", /*staging_bytes=*/0));
    return Wait();
  }

  absl::Status SaveAsync(int64_t step, const TrainingRun& run) override {
    const comm::PhaseScope phase(Activity(), comm::Phase::kCheckpoint,
                                 "copying what is saved");
    return Start(step, run, "SaveAsync()", options_.staging_bytes);
  }

  absl::Status Wait() override {
    const std::optional<Saver::Ended> ended = saver_.Wait();
    if (!ended.has_value()) return absl::OkStatus();
    if (ended->status.ok()) abandoned_.erase(ended->step);
    return ended->status;
  }

  absl::StatusOr<std::vector<int64_t>> Steps() const override {
    FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                          ListCheckpoints(*context_.files, context_.root));
    std::vector<int64_t> steps;
    steps.reserve(list.size());
    for (const Committed& one : list) steps.push_back(one.step);
    return steps;
  }

  absl::StatusOr<std::optional<int64_t>> LoadLatest(
      TrainingRun& run, const LoadRunOptions& options) override {
    FSDP_RETURN_IF_ERROR(Wait());
    // What rank 0 sees counts: other ranks may not see yet what it does.
    absl::StatusOr<std::optional<Committed>> latest = std::nullopt;
    if (together_.rank() == 0) {
      latest = LatestCheckpoint(*context_.files, context_.root);
    }
    FSDP_RETURN_IF_ERROR(
        together_.Agree(latest.status(), "looking for checkpoints"));
    int64_t step = latest->has_value() ? (*latest)->step : -1;
    FSDP_ASSIGN_OR_RETURN(const std::string text,
                          together_.Share(absl::StrCat(step), kLabel));
    FSDP_CHECK(absl::SimpleAtoi(text, &step));
    if (step < 0) return std::optional<int64_t>();
    FSDP_RETURN_IF_ERROR(Load(step, run, options));
    return std::optional<int64_t>(step);
  }

  absl::Status Load(int64_t step, TrainingRun& run,
                    const LoadRunOptions& options) override {
    const comm::PhaseScope phase(Activity(), comm::Phase::kCheckpoint,
                                 "loading");
    FSDP_RETURN_IF_ERROR(Wait());
    const LoadContext context{context_.files, context_.root,  together_,
                              options.strict, options_.saves, options.progress};
    FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> steps,
                          LoadRun(context, step, run));
    context_.retention.keep = {step};
    goes_on_ = true;
    GiveUpAbove(step, steps);
    return absl::OkStatus();
  }

 private:
  // Null if there are no other ranks.
  std::shared_ptr<comm::RankActivity> Activity() const {
    return ranks_ == nullptr ? nullptr : ranks_->activity();
  }

  // Checkpoints of higher steps, which the user has given up, are replaced when
  // the run gets there.
  void GiveUpAbove(int64_t step, const std::vector<int64_t>& steps) {
    abandoned_.clear();
    for (const int64_t one : steps) {
      if (one > step && together_.rank() == 0) abandoned_.insert(one);
    }
  }

  // Refuses a first save that meets, now or later, what an earlier run left.
  absl::Status CheckFirst(int64_t step) {
    // Without any it is -1, as is a step that is refused later.
    if (!goes_on_ && left_ >= 0) {
      absl::Status mine;
      if (options_.overwrite && together_.rank() == 0) {
        const absl::StatusOr<std::vector<int64_t>> steps = Steps();
        mine = steps.status();
        if (mine.ok()) GiveUpAbove(step, *steps);
      } else if (!options_.overwrite && step <= left_) {
        mine = absl::AlreadyExistsError(absl::StrCat(
            context_.root, " has checkpoints up to step ", left_,
            ", which this run has not loaded, and it saves step ", step,
            ": go on from them by LoadLatest(), name another folder, or set "
            "CheckpointerOptions::overwrite"));
      }
      FSDP_RETURN_IF_ERROR(together_.Agree(mine, "saving a checkpoint"));
    }
    goes_on_ = true;
    return absl::OkStatus();
  }

  // Returns OK if all ranks go on to Plan(). If Plan() sends no messages, only
  // the status of this rank counts.
  absl::Status AllGoOn(const TrainingRun& run,
                       const std::optional<RunValues>& values,
                       const absl::Status& mine) const {
    if (!IsCollective(ShardedOf(run.model)) || ranks_ == nullptr) return mine;
    FSDP_RETURN_IF_ERROR(together_.Agree(mine, "saving a checkpoint"));
    return CheckSameParts(together_, *values, Parts());
  }

  // Fills `job` with what is to be written; the values stay where they are.
  absl::Status Plan(const RunValues& values, const TrainingRun& run,
                    SaveJob* job) const {
    FSDP_ASSIGN_OR_RETURN(const std::vector<TensorGroup> groups,
                          PartsToWrite(values, together_.rank(), Parts()));
    std::map<std::string, std::string> texts = options_.texts;
    TrainingRecord record =
        RecordOf(run, values.optimizer(), job->step, together_.world_size());
    FSDP_ASSIGN_OR_RETURN(texts[kTrainingName], ToText(record));
    FSDP_ASSIGN_OR_RETURN(job->plan,
                          options_.layout == SaveLayout::kPerRank
                              ? PlanSavePerRank(groups, together_.rank())
                              : PlanSave(groups, options_.max_file_bytes));
    if (together_.rank() == 0) job->plan.Add(texts);
    // Ranks have to agree on numbers and options; the entries are rank 0's.
    record.entries.clear();
    FSDP_ASSIGN_OR_RETURN(const std::string numbers, ToText(record));
    absl::StrAppend(&job->plan.text, numbers);
    FSDP_ASSIGN_OR_RETURN(std::string rank_file,
                          Format(TakeRankValues(run, values.device())));
    job->plan.own.push_back(
        WholeFile(RankFileName(together_.rank()), std::move(rank_file)));
    // A single rank has no copies of buffers that could differ.
    if (together_.world_size() == 1) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(job->buffers_file,
                          Format(TakeWholeValues(values.model())));
    return absl::OkStatus();
  }

  PartOptions Parts() const {
    PartOptions parts;
    parts.model_dtype = options_.model_dtype;
    if (options_.saves == nullptr) return parts;
    parts.names = [this](const std::string& name) {
      return options_.saves(name) ? std::make_optional(name) : std::nullopt;
    };
    return parts;
  }

  // Returns when the values are copied, or written if there is no memory for
  // copies.
  absl::Status Start(int64_t step, const TrainingRun& run,
                     absl::string_view what, int64_t staging_bytes) {
    FSDP_RETURN_IF_ERROR(Wait());
    FSDP_RETURN_IF_ERROR(CheckFirst(step));
    const NormalMode normal;
    // They live as long as the save reads the live values.
    std::optional<RunValues> values;
    SaveJob job = BeginSave(step, run, what, values);
    saver_.Save(context_, std::move(job), staging_bytes);
    return absl::OkStatus();
  }

  // Returns what to save, or why nothing can be. The save owns `values` as long
  // as they live.
  SaveJob BeginSave(int64_t step, const TrainingRun& run,
                    absl::string_view what, std::optional<RunValues>& values) {
    SaveJob job;
    job.step = step;
    context_.overwrite = options_.overwrite || abandoned_.count(step) > 0;
    context_.retention.ignore = abandoned_;
    context_.retention.ignore.erase(step);
    job.mine = TorchToStatus(what, [&] {
      const absl::Status mine = TorchToStatus(what, [&]() -> absl::Status {
        if (step < 0) {
          return absl::InvalidArgumentError(
              absl::StrCat(what, ": there is no step ", step));
        }
        FSDP_ASSIGN_OR_RETURN(values, RunValues::Read(run, what));
        FSDP_RETURN_IF_ERROR(values->CheckRanks(together_));
        return values->CheckLoaded();
      });
      job.others = AllGoOn(run, values, mine);
      ThrowIfError(mine);
      if (!job.others.ok()) return;
      ThrowIfError(Plan(*values, run, &job));
    });
    job.bytes_to_write = job.plan.BytesToWrite(together_.rank());
    if (options_.progress != nullptr) {
      const int64_t all = job.bytes_to_write;
      context_.writer.progress = [this, all](int64_t done) {
        options_.progress(done, all);
      };
    }
    return job;
  }

  const CheckpointerOptions options_;
  std::unique_ptr<comm::Communicator> ranks_;
  std::unique_ptr<CheckpointFolder> folder_;
  SaveContext context_;
  const Together& together_ = context_.together;
  // steps that the user has given up; filled on rank 0 only
  std::set<int64_t> abandoned_;
  int64_t left_ = -1;     // the newest step when the folder was opened
  bool goes_on_ = false;  // has loaded a checkpoint or saved one
  Saver saver_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(
    const std::string& folder, const std::shared_ptr<comm::Communicator>& ranks,
    const CheckpointerOptions& options) {
  auto opened = std::make_unique<FolderCheckpointer>(folder, options);
  FSDP_RETURN_IF_ERROR(opened->Begin(ranks));
  return opened;
}

absl::StatusOr<std::optional<int64_t>> NewestStep(const std::string& folder) {
  const absl::StatusOr<std::optional<Committed>> latest =
      LatestCheckpoint(RealFileSystem(), folder);
  if (absl::IsNotFound(latest.status())) return std::nullopt;
  FSDP_RETURN_IF_ERROR(latest.status());
  if (!latest->has_value()) return std::nullopt;
  return (*latest)->step;
}

}  // namespace fsdp::checkpoint
