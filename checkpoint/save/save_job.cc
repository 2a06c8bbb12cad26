#include <atomic>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/files/checksums.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/save/ranks.h"
#include "checkpoint/save/saver.h"
#include "comm/agreement.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "checkpoint";
constexpr char kWhat[] = "writing a checkpoint";

// The error of a rank whose own act ended with `mine`, and whose wait for the
// others with `waited`, an error: what went wrong here, where it is not a
// consequence of that wait. A rank that the others gave up meets what they have
// done to the folder meanwhile.
absl::Status OwnOrWaited(const absl::Status& mine, const absl::Status& waited) {
  const bool says_more = !absl::IsDeadlineExceeded(waited) && !mine.ok() &&
                         !absl::IsCancelled(mine);
  if (!says_more) return waited;
  return absl::Status(
      mine.code(),
      absl::StrCat(mine.message(), "; the save was over: ", waited.message()));
}

class Save {
 public:
  Save(const SaveContext& context, const SaveJob& job,
       const std::function<void(const absl::Status&)>& on_given_up)
      : context_(context),
        together_(context.together),
        job_(job),
        folder_(WrittenPath(context.root, job.step, context.token,
                            context.commit_by)),
        on_given_up_(on_given_up),
        writer_options_(context.writer) {
    for (const PlannedFile& file : job.plan.files) AddPath(file.name);
    for (const PlannedFile& file : job.plan.own) AddPath(file.name);
    writer_options_.cancelled = &given_up_;
    writer_options_.came_back = [this](int64_t bytes) {
      progress_.CameBack(bytes);
    };
  }

  absl::Status Run(const RangeFeed& feed) {
    absl::Status status;
    if (context_.commit_by == CommitBy::kManifest) status = BeginTogether();
    if (status.ok()) status = WriteTogether(feed);
    // Ranks that were left behind hear nothing any more.
    if (given_up_) {
      if (together_.rank() == 0) Finish(status).IgnoreError();
      return status;
    }
    const bool may_be_saved = status.ok();
    const absl::Status waited = Await(
        [&] {
          if (together_.rank() != 0) return;
          status = TorchToStatus(kWhat, [&] { return Finish(status); });
        },
        may_be_saved);
    if (waited.ok()) return Share(status);
    return status.ok() ? MayBeSaved(waited, job_.step) : status;
  }

 private:
  // Returns what has to be the same on all ranks, line by line.
  std::string Agreed() const {
    return absl::StrCat("step ", job_.step, "\n", job_.plan.text);
  }

  int64_t AddPath(const std::string& name) {
    paths_.push_back(JoinPath(folder_, name));
    return static_cast<int64_t>(paths_.size()) - 1;
  }

  absl::Status WriteTogether(const RangeFeed& feed) {
    RankReport report;
    report.plan = Crc32c(Agreed());
    report.whole_values = Crc32c(job_.buffers_file);
    absl::Status waited = Await([&] {
      report.status =
          TorchToStatus(kWhat, [&] { return WritePart(feed, &report); });
    });
    if (waited.ok()) return ExchangeAll(std::move(report));
    return OwnOrWaited(report.status, waited);
  }

  // --- This rank's part -----------------------------------------------------

  absl::Status WritePart(const RangeFeed& feed, RankReport* report) {
    const absl::StatusOr<std::unique_ptr<RangeWriter>> writer = Begin();
    absl::Status begun = writer.status();
    if (begun.ok()) {
      begun = WriteHeaders(job_.plan, together_.rank(), **writer);
    }
    if (!begun.ok()) return feed(begun);
    FSDP_RETURN_IF_ERROR(feed(writer->get()));
    report->own_files.assign(job_.plan.own.begin(), job_.plan.own.end());
    return Finish(**writer, report);
  }

  static absl::Status Finish(RangeWriter& writer, RankReport* report) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<FilePiece> pieces, writer.Finish());
    report->pieces.insert(report->pieces.end(), pieces.begin(), pieces.end());
    return absl::OkStatus();
  }

  absl::Status BeginFolder() {
    FSDP_RETURN_IF_ERROR(job_.mine);
    if (together_.rank() != 0) return absl::OkStatus();
    return context_.folder->Begin(job_.step, context_.overwrite).status();
  }

  absl::StatusOr<std::unique_ptr<RangeWriter>> Begin() {
    FSDP_RETURN_IF_ERROR(job_.mine);
    FileSystem& files = *context_.files;
    if (context_.commit_by == CommitBy::kRename) {
      FSDP_RETURN_IF_ERROR(BeginFolder());
    }
    // Nobody waits for rank 0: whoever comes first makes the folders.
    std::set<std::string> folders = {folder_};
    for (const std::string& path : paths_) folders.insert(FolderOf(path));
    for (const std::string& folder : folders) {
      FSDP_RETURN_IF_ERROR(files.MakeFolder(folder).status());
    }
    return RangeWriter::Create(files, paths_, writer_options_);
  }

  // --- All ranks together ---------------------------------------------------

  // Until all ranks have acted. After an error no rank waits for another one
  // in this save, which `may_be_saved` all the same.
  absl::Status Await(absl::FunctionRef<void()> act, bool may_be_saved = false) {
    if (together_.ranks == nullptr) {
      act();
      return absl::OkStatus();
    }
    RoundOptions options;
    options.timeout = together_.timeout;
    options.stall_timeout = context_.stall_timeout;
    options.what = absl::StrCat("saving step ", job_.step);
    options.all_bytes = job_.bytes_to_write;
    options.on_error = [this, may_be_saved](const absl::Status& status) {
      given_up_ = true;
      // Otherwise what goes wrong here may say more.
      if (on_given_up_ != nullptr && absl::IsDeadlineExceeded(status)) {
        on_given_up_(may_be_saved ? MayBeSaved(status, job_.step) : status);
      }
    };
    return ActInRounds(*together_.ranks, options, progress_, act);
  }

  // Brings the reports of all ranks to all of them, in reports_.
  absl::Status Exchange(const RankReport& mine) {
    reports_.clear();
    if (together_.ranks == nullptr) {
      reports_.push_back(mine);
      return absl::OkStatus();
    }
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                          comm::GatherStrings(*together_.ranks, Encode(mine),
                                              kLabel, together_.Deadline()));
    for (const std::string& text : texts) {
      FSDP_ASSIGN_OR_RETURN(RankReport report, Decode(text));
      reports_.push_back(std::move(report));
    }
    return absl::OkStatus();
  }

  // Until rank 0 has seen to it, what is in the folder is another checkpoint.
  absl::Status BeginTogether() {
    absl::Status begun;
    const absl::Status waited = Await(
        [&] { begun = TorchToStatus(kWhat, [&] { return BeginFolder(); }); });
    if (!waited.ok()) return OwnOrWaited(begun, waited);
    return together_.Agree(begun, kLabel);
  }

  absl::Status ExchangeAll(RankReport mine) {
    FSDP_RETURN_IF_ERROR(Exchange(mine));
    FSDP_RETURN_IF_ERROR(CheckReports(reports_));
    const bool have_one_plan =
        absl::c_all_of(reports_, [this](const RankReport& report) {
          return report.plan == reports_[0].plan;
        });
    if (!have_one_plan) {
      // All ranks see that.
      return together_.CheckSame(Agreed(),
                                 "names, shapes and numbers of what is saved");
    }
    FSDP_RETURN_IF_ERROR(job_.others);
    const auto differs = [this](const RankReport& report) {
      return report.whole_values != reports_[0].whole_values;
    };
    if (!absl::c_any_of(reports_, differs)) return absl::OkStatus();
    const absl::Status waited = Await([&] {
      if (!differs(mine)) return;
      mine.status = TorchToStatus(kWhat, [&] { return AddBuffers(&mine); });
    });
    if (!waited.ok()) return OwnOrWaited(mine.status, waited);
    FSDP_RETURN_IF_ERROR(Exchange(mine));
    return CheckReports(reports_);
  }

  absl::Status AddBuffers(RankReport* report) {
    const std::string name = BuffersFileName(together_.rank());
    const int64_t file = AddPath(name);
    RangeWriterOptions options = writer_options_;
    options.progress = nullptr;  // of what was planned
    FSDP_ASSIGN_OR_RETURN(
        const auto writer,
        RangeWriter::Create(*context_.files, paths_, std::move(options)));
    FSDP_RETURN_IF_ERROR(writer->WriteBytes(file, 0, job_.buffers_file));
    report->own_files.push_back(
        {name, static_cast<int64_t>(job_.buffers_file.size())});
    return Finish(*writer, report);
  }

  // --- Rank 0 ---------------------------------------------------------------

  absl::Status Finish(absl::Status status) {
    if (status.ok()) status = Commit();
    if (!status.ok()) {
      if (context_.folder != nullptr) {
        context_.folder->Discard(job_.step).IgnoreError();
      }
      return status;
    }
    // The run may have gone on from an older one, which it is not to lose.
    if (given_up_) return absl::OkStatus();
    progress_.CameBack(0);
    const absl::Status pruned =
        context_.folder->Prune(context_.retention).status();
    if (!pruned.ok()) {
      TORCH_WARN("step ", job_.step, " is saved, but older ones could not be ",
                 "removed: ", std::string(pruned.message()));
    }
    return absl::OkStatus();
  }

  absl::Status Commit() {
    Manifest manifest;
    manifest.step = job_.step;
    FSDP_ASSIGN_OR_RETURN(
        manifest.files,
        CombineReports({job_.plan.files.begin(), job_.plan.files.end()},
                       absl::MakeSpan(reports_)));
    return context_.folder->Commit(job_.step, manifest);
  }

  // Rank 0's result on all ranks.
  absl::Status Share(const absl::Status& status) {
    if (together_.ranks == nullptr) return status;
    RankReport report;
    report.status = status;
    const absl::StatusOr<std::string> text =
        together_.Share(Encode(report), kLabel);
    // What went wrong here says more than that rank 0 could not be asked, which
    // may have committed.
    if (!text.ok()) {
      return status.ok() ? MayBeSaved(text.status(), job_.step) : status;
    }
    FSDP_ASSIGN_OR_RETURN(const RankReport result, Decode(*text));
    return result.status.ok() ? result.status : comm::AsAgreed(result.status);
  }

  const SaveContext& context_;
  const Together& together_;
  const SaveJob& job_;
  const std::string folder_;
  const std::function<void(const absl::Status&)>& on_given_up_;  // may be null
  RangeWriterOptions writer_options_;
  DiskProgress progress_;
  // Nobody waits any longer: what writes ends as soon as it can.
  std::atomic<bool> given_up_{false};
  std::vector<std::string> paths_;  // of the plan's files, and own ones
  std::vector<RankReport> reports_;
};

}  // namespace

absl::Status RunSave(
    const SaveContext& context, const SaveJob& job, const RangeFeed& feed,
    const std::function<void(const absl::Status&)>& on_given_up) {
  return Save(context, job, on_given_up).Run(feed);
}

}  // namespace fsdp::checkpoint
