#include "checkpoint/save/ranks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/plain_bytes.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "progress of a save";

// A rank says these numbers in a round.
enum Number { kEnded, kBytes, kAllBytes, kStalledMs, kNumbers };
constexpr size_t kPieceNumbers = 4;  // of a piece in a report
constexpr char kNotCommitted[] =
    "; this checkpoint is not committed; report a bug";

// Returns the numbers of all ranks, a row for each.
absl::StatusOr<at::Tensor> Exchange(comm::Communicator& ranks,
                                    const RoundOptions& options,
                                    const DiskProgress& progress,
                                    absl::Time start, bool ended) {
  const absl::Duration stalled =
      absl::Now() - std::max(start, absl::FromUnixNanos(progress.last));
  const at::Tensor mine =
      at::tensor({int64_t{ended}, progress.bytes.load(), options.all_bytes,
                  ended ? 0 : absl::ToInt64Milliseconds(stalled)},
                 at::kLong);
  const at::Tensor all =
      at::empty({int64_t{kNumbers} * ranks.world_size()}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(const auto work, ranks.AllGather(all, mine, kLabel));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options.timeout));
  return all.view({-1, kNumbers});
}

// All ranks see the same.
absl::Status CheckStalls(const RoundOptions& options,
                         const at::Tensor& states) {
  const int64_t limit = absl::ToInt64Milliseconds(options.stall_timeout);
  const auto numbers = states.accessor<int64_t, 2>();
  for (int64_t rank = 0; rank < numbers.size(0); ++rank) {
    const auto state = numbers[rank];
    if (state[kStalledMs] <= limit) continue;
    return absl::DeadlineExceededError(absl::StrCat(
        options.what, ": rank ", rank, " has waited for its disk for ",
        absl::FormatDuration(absl::Milliseconds(state[kStalledMs])), ", where ",
        state[kBytes], " of ", state[kAllBytes],
        " bytes are written; the save is given up; see what that disk does, "
        "or raise CheckpointerOptions::stall_timeout"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act) {
  const absl::Time start = absl::Now();
  absl::Notification ended;  // this rank's `act` has returned
  // Returns when all have ended, or one is given up.
  const auto run = [&] {
    absl::Status status = TorchToStatus(kLabel, [&]() -> absl::Status {
      while (true) {
        ended.WaitForNotificationWithTimeout(options.interval);
        FSDP_ASSIGN_OR_RETURN(
            const at::Tensor states,
            Exchange(ranks, options, progress, start, ended.HasBeenNotified()));
        FSDP_RETURN_IF_ERROR(CheckStalls(options, states));
        if (states.select(1, kEnded).all().item<bool>()) {
          return absl::OkStatus();
        }
      }
    });
    if (!status.ok() && options.on_error != nullptr) options.on_error(status);
    return status;
  };
  absl::Status status;
  absl::StatusOr<std::thread> thread = StartThread(
      "to tell other ranks how far a save is", [&] { status = run(); });
  act();
  ended.Notify();
  if (thread.ok()) {
    thread->join();
  } else {
    // The others have waited for a first word.
    status = run();
  }
  return status;
}

std::string Encode(const RankReport& report) {
  std::string bytes;
  AppendList<int32_t>(bytes, {report.status.raw_code()});
  AppendText(bytes, report.status.message());
  AppendList<uint32_t>(bytes, {report.plan, report.whole_values});
  std::vector<int64_t> sizes;
  sizes.reserve(report.own_files.size());
  for (const NamedSize& file : report.own_files) sizes.push_back(file.bytes);
  AppendList<int64_t>(bytes, sizes);
  for (const NamedSize& file : report.own_files) AppendText(bytes, file.name);
  std::vector<int64_t> pieces;
  pieces.reserve(report.pieces.size() * kPieceNumbers);
  for (const FilePiece& piece : report.pieces) {
    pieces.insert(pieces.end(),
                  {piece.file, piece.offset, piece.bytes, piece.crc32c});
  }
  AppendList<int64_t>(bytes, pieces);
  return bytes;
}

absl::StatusOr<RankReport> Decode(absl::string_view bytes) {
  BytesReader reader(bytes);
  const std::vector<int32_t> code = reader.TakeList<int32_t>();
  const absl::string_view message = reader.TakeText();
  const std::vector<uint32_t> sums = reader.TakeList<uint32_t>();
  RankReport report;
  bool valid = true;
  for (const int64_t size : reader.TakeList<int64_t>()) {
    valid &= size >= 0;
    report.own_files.push_back({"", size});
  }
  for (NamedSize& file : report.own_files) {
    file.name = std::string(reader.TakeText());
  }
  const std::vector<int64_t> pieces = reader.TakeList<int64_t>();
  valid &= reader.ok() && reader.left() == 0 && code.size() == 1 &&
           sums.size() == 2 && pieces.size() % kPieceNumbers == 0;
  if (!valid) {
    return absl::InternalError(
        "a rank has sent what is no report of a checkpoint: do all run the "
        "same program?");
  }
  for (size_t i = 0; i < pieces.size(); i += kPieceNumbers) {
    report.pieces.push_back({pieces[i], pieces[i + 1], pieces[i + 2],
                             static_cast<uint32_t>(pieces[i + 3])});
  }
  report.status = absl::Status(static_cast<absl::StatusCode>(code[0]), message);
  report.plan = sums[0];
  report.whole_values = sums[1];
  return report;
}

absl::Status CheckReports(absl::Span<const RankReport> reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const absl::Status& status = reports[rank].status;
    if (reports.size() == 1) return status;
    FSDP_RETURN_IF_ERROR(Annotate(status, absl::StrCat("rank ", rank)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, FileSums>> CombineReports(
    std::vector<NamedSize> shared, absl::Span<RankReport> reports) {
  const auto count = static_cast<int64_t>(shared.size());
  std::vector<NamedSize> files = std::move(shared);
  std::vector<FilePiece> pieces;
  for (RankReport& report : reports) {
    // The rank's own files are behind all others so far.
    const auto first = static_cast<int64_t>(files.size());
    const auto all = count + static_cast<int64_t>(report.own_files.size());
    for (FilePiece& piece : report.pieces) {
      if (piece.file < count) continue;
      if (piece.file >= all) {
        return absl::InternalError(
            absl::StrCat("checksums of file ", piece.file, ", where there are ",
                         all, kNotCommitted));
      }
      piece.file += first - count;
    }
    files.insert(files.end(), report.own_files.begin(), report.own_files.end());
    pieces.insert(pieces.end(), report.pieces.begin(), report.pieces.end());
    std::vector<FilePiece>().swap(report.pieces);
  }
  auto sums = CombinePieces(std::move(pieces), files);
  if (!sums.ok()) {
    return absl::InternalError(
        absl::StrCat(sums.status().message(), kNotCommitted));
  }
  std::map<std::string, FileSums> result;
  for (size_t i = 0; i < files.size(); ++i) {
    if (result.emplace(files[i].name, std::move((*sums)[i])).second) continue;
    return absl::InternalError(absl::StrCat("several ranks have written a ",
                                            files[i].name,
                                            " of their own; report a bug"));
  }
  return result;
}

}  // namespace fsdp::checkpoint
