#include "checkpoint/save/save_job.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_names.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/run/rank_values.h"
#include "checkpoint/save/plan_writer.h"
#include "checkpoint/save/rank_report.h"
#include "comm/agreement.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "checkpoint";

class Save {
 public:
  Save(const SaveContext& context, const SaveJob& job)
      : context_(context),
        job_(job),
        folder_(StepPath(context.root, job.step, Stage::kIncomplete)) {
    for (const SaveFile& file : job.plan.files) names_.push_back(file.name);
    first_rank_file_ = static_cast<int64_t>(names_.size());
    for (int rank = 0; rank < context.world_size(); ++rank) {
      names_.push_back(RankFileName(rank));
    }
    first_buffers_file_ = static_cast<int64_t>(names_.size());
    for (int rank = 0; rank < context.world_size(); ++rank) {
      names_.push_back(BuffersFileName(rank));
    }
    for (const std::string& name : names_) {
      paths_.push_back(JoinPath(folder_, name));
    }
  }

  absl::Status Run(const RangeFeed& feed) {
    RankReport report;
    report.plan = PlanSummary();
    report.whole_values = offload::Crc32c(job_.buffers_file);
    report.own_bytes = {static_cast<int64_t>(job_.rank_file.size())};
    absl::StatusOr<std::vector<Piece>> written = WritePart(feed);
    report.status = written.status();
    if (written.ok()) report.pieces = *std::move(written);
    absl::Status status = ExchangeAll(std::move(report));
    if (context_.rank() == 0) status = Finish(status);
    return Share(status);
  }

 private:
  // Short, since every rank gets it of every other.
  std::string PlanSummary() const {
    return absl::StrFormat(
        "step %d; %d bytes of names, shapes and numbers, checksum %08x",
        job_.step, job_.plan.text.size(), offload::Crc32c(job_.plan.text));
  }

  // --- This rank's part -----------------------------------------------------

  absl::StatusOr<std::vector<Piece>> WritePart(const RangeFeed& feed) {
    absl::StatusOr<std::unique_ptr<RangeWriter>> writer = Begin();
    absl::Status status = writer.status();
    if (status.ok() && context_.rank() == 0) {
      status = WriteHeads(job_.plan, **writer);
    }
    if (!status.ok()) {
      // What feeds has to end.
      feed(status).IgnoreError();
      return status;
    }
    FSDP_RETURN_IF_ERROR(feed(writer->get()));
    FSDP_RETURN_IF_ERROR((*writer)->WriteBytes(
        first_rank_file_ + context_.rank(), 0, job_.rank_file));
    return (*writer)->Finish();
  }

  absl::StatusOr<std::unique_ptr<RangeWriter>> Begin() {
    FSDP_RETURN_IF_ERROR(job_.mine);
    FileSystem& files = *context_.files;
    if (context_.rank() == 0) {
      FSDP_RETURN_IF_ERROR(
          context_.folder->Begin(job_.step, context_.overwrite).status());
    }
    // Nobody waits for rank 0: whoever comes first makes the folders.
    FSDP_RETURN_IF_ERROR(files.MakeFolder(folder_).status());
    for (const std::string& name : job_.plan.folders) {
      FSDP_RETURN_IF_ERROR(files.MakeFolder(JoinPath(folder_, name)).status());
    }
    FSDP_RETURN_IF_ERROR(
        files.MakeFolder(JoinPath(folder_, kRanksFolder)).status());
    return RangeWriter::Create(files, paths_, context_.writer);
  }

  // --- All ranks together ---------------------------------------------------

  absl::Time Deadline() const { return absl::Now() + context_.timeout; }

  // What all ranks have to say, on all of them, in reports_.
  absl::Status Exchange(const RankReport& mine) {
    reports_.clear();
    if (context_.ranks == nullptr) {
      reports_.push_back(mine);
      return absl::OkStatus();
    }
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::string> texts,
        comm::GatherStrings(*context_.ranks, Encode(mine), kLabel, Deadline()));
    for (const std::string& text : texts) {
      FSDP_ASSIGN_OR_RETURN(RankReport report, Decode(text));
      reports_.push_back(std::move(report));
    }
    return absl::OkStatus();
  }

  absl::Status ExchangeAll(RankReport mine) {
    FSDP_RETURN_IF_ERROR(Exchange(mine));
    FSDP_RETURN_IF_ERROR(CheckReports(reports_));
    std::vector<bool> differs;
    bool any_differs = false;
    for (const RankReport& report : reports_) {
      differs.push_back(report.whole_values != reports_[0].whole_values);
      any_differs |= differs.back();
    }
    if (!any_differs) return absl::OkStatus();
    if (differs[context_.rank()]) mine.status = AddBuffers(&mine);
    FSDP_RETURN_IF_ERROR(Exchange(mine));
    return CheckReports(reports_);
  }

  absl::Status AddBuffers(RankReport* report) {
    FSDP_ASSIGN_OR_RETURN(
        const auto writer,
        RangeWriter::Create(*context_.files, paths_, context_.writer));
    FSDP_RETURN_IF_ERROR(writer->WriteBytes(
        first_buffers_file_ + context_.rank(), 0, job_.buffers_file));
    FSDP_ASSIGN_OR_RETURN(const std::vector<Piece> pieces, writer->Finish());
    report->pieces.insert(report->pieces.end(), pieces.begin(), pieces.end());
    report->own_bytes.push_back(static_cast<int64_t>(job_.buffers_file.size()));
    return absl::OkStatus();
  }

  // --- Rank 0 ---------------------------------------------------------------

  absl::Status Finish(absl::Status status) {
    if (status.ok()) status = Commit();
    if (!status.ok()) {
      context_.folder->Discard(job_.step).IgnoreError();
      return status;
    }
    const absl::Status pruned =
        context_.folder->Prune(context_.retention).status();
    if (pruned.ok()) return pruned;
    return absl::Status(
        pruned.code(),
        absl::StrCat("step ", job_.step,
                     " is saved, but older ones could not be removed: ",
                     pruned.message()));
  }

  absl::Status Commit() {
    std::vector<NamedSize> sizes;
    for (const std::string& name : names_) sizes.push_back({name, 0});
    for (size_t i = 0; i < job_.plan.files.size(); ++i) {
      sizes[i].bytes = job_.plan.files[i].bytes;
    }
    std::vector<Piece> pieces;
    std::vector<bool> exists(names_.size(), true);
    for (size_t rank = 0; rank < reports_.size(); ++rank) {
      RankReport& report = reports_[rank];
      sizes[first_rank_file_ + rank].bytes = report.own_bytes[0];
      exists[first_buffers_file_ + rank] = report.own_bytes.size() > 1;
      if (report.own_bytes.size() > 1) {
        sizes[first_buffers_file_ + rank].bytes = report.own_bytes[1];
      }
      pieces.insert(pieces.end(), report.pieces.begin(), report.pieces.end());
      report.pieces.clear();
    }
    FSDP_ASSIGN_OR_RETURN(std::vector<FileSums> sums,
                          CombinePieces(std::move(pieces), sizes));
    Manifest manifest;
    manifest.step = job_.step;
    for (size_t i = 0; i < names_.size(); ++i) {
      if (exists[i]) manifest.files[names_[i]] = std::move(sums[i]);
    }
    return context_.folder->Commit(job_.step, manifest);
  }

  // Rank 0's result on all ranks.
  absl::Status Share(const absl::Status& status) {
    if (context_.ranks == nullptr) return status;
    RankReport report;
    report.status = status;
    const absl::StatusOr<std::string> text = comm::BroadcastString(
        *context_.ranks, Encode(report), /*root=*/0, kLabel, Deadline());
    // What went wrong here says more than that rank 0 could not be asked.
    if (!text.ok()) return status.ok() ? text.status() : status;
    FSDP_ASSIGN_OR_RETURN(const RankReport result, Decode(*text));
    return result.status;
  }

  const SaveContext& context_;
  const SaveJob& job_;
  const std::string folder_;
  std::vector<std::string> names_;  // of all files that there may be
  std::vector<std::string> paths_;
  int64_t first_rank_file_ = 0;
  int64_t first_buffers_file_ = 0;
  std::vector<RankReport> reports_;
};

}  // namespace

absl::Status RunSave(const SaveContext& context, const SaveJob& job,
                     const RangeFeed& feed) {
  return Save(context, job).Run(feed);
}

}  // namespace fsdp::checkpoint
