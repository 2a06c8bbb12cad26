#include "checkpoint/save/ranks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/plain_bytes.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "progress of a save";

// What a rank says in a round.
struct State {
  int64_t ended = 0;
  int64_t bytes = 0;
  int64_t all_bytes = 0;
  int64_t stalled_ms = 0;  // since a call came back
};
constexpr int64_t kNumbers = sizeof(State) / sizeof(int64_t);

class Rounds {
 public:
  Rounds(comm::Communicator& ranks, const RoundOptions& options,
         const DiskProgress& progress)
      : ranks_(ranks), options_(options), progress_(progress) {}

  // This rank's `act` has returned.
  void End() { ended_.Notify(); }

  // Until all have ended, or one is given up.
  absl::Status Run() {
    absl::Status status = TorchToStatus(kLabel, [this]() -> absl::Status {
      while (true) {
        ended_.WaitForNotificationWithTimeout(options_.interval);
        FSDP_ASSIGN_OR_RETURN(const std::vector<State> states,
                              Exchange(MyState()));
        FSDP_RETURN_IF_ERROR(CheckStalls(states));
        const bool all_ended =
            std::all_of(states.begin(), states.end(),
                        [](const State& state) { return state.ended != 0; });
        if (all_ended) return absl::OkStatus();
      }
    });
    if (!status.ok() && options_.on_error != nullptr) options_.on_error(status);
    return status;
  }

 private:
  State MyState() {
    const absl::Time now = absl::Now();
    const int64_t calls = progress_.calls;
    if (calls != calls_) {
      calls_ = calls;
      since_ = now;
    }
    State state;
    state.ended = ended_.HasBeenNotified() ? 1 : 0;
    state.bytes = progress_.bytes;
    state.all_bytes = options_.all_bytes;
    if (state.ended == 0) {
      state.stalled_ms = absl::ToInt64Milliseconds(now - since_);
    }
    return state;
  }

  absl::StatusOr<std::vector<State>> Exchange(const State& mine) {
    const at::Tensor in = at::empty({kNumbers}, at::kLong);
    const at::Tensor out =
        at::empty({kNumbers * ranks_.world_size()}, at::kLong);
    std::memcpy(in.mutable_data_ptr<int64_t>(), &mine, sizeof(mine));
    FSDP_ASSIGN_OR_RETURN(const auto work, ranks_.AllGather(out, in, kLabel));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options_.timeout));
    std::vector<State> states(ranks_.world_size());
    static_assert(std::is_trivially_copyable_v<State>);
    std::memcpy(static_cast<void*>(states.data()),
                out.const_data_ptr<int64_t>(), states.size() * sizeof(State));
    return states;
  }

  // All ranks see the same.
  absl::Status CheckStalls(const std::vector<State>& states) const {
    const int64_t limit = absl::ToInt64Milliseconds(options_.stall_timeout);
    for (size_t rank = 0; rank < states.size(); ++rank) {
      const State& state = states[rank];
      if (state.stalled_ms <= limit) continue;
      return absl::DeadlineExceededError(absl::StrCat(
          options_.what, ": rank ", rank, " has waited for its disk for ",
          absl::FormatDuration(absl::Milliseconds(state.stalled_ms)),
          ", where ", state.bytes, " of ", state.all_bytes,
          " bytes are written; the save is given up; see what that disk does, "
          "or raise CheckpointerOptions::stall_timeout"));
    }
    return absl::OkStatus();
  }

  comm::Communicator& ranks_;
  const RoundOptions& options_;
  const DiskProgress& progress_;
  absl::Notification ended_;
  int64_t calls_ = 0;
  absl::Time since_ = absl::Now();  // calls_ are as many as they are
};

}  // namespace

absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act) {
  Rounds rounds(ranks, options, progress);
  absl::Status status;
  absl::StatusOr<std::thread> thread = StartThread(
      "to tell other ranks how far a save is", [&] { status = rounds.Run(); });
  act();
  rounds.End();
  if (thread.ok()) {
    thread->join();
  } else {
    // The others have waited for a first word.
    status = rounds.Run();
  }
  return status;
}

namespace {

// Neighboring blocks of a file as one; the checksum of each goes to `sums`.
std::vector<int64_t> PlacesOf(absl::Span<const Piece> pieces,
                              std::vector<uint32_t>& sums) {
  std::vector<int64_t> places;  // file, offset and bytes of each
  bool is_run = false;
  for (const Piece& piece : pieces) {
    const size_t size = places.size();
    const bool is_block =
        piece.bytes == kBlockBytes && piece.offset % kBlockBytes == 0;
    sums.push_back(piece.crc32c);
    if (is_block && is_run && places[size - 3] == piece.file &&
        places[size - 2] + places[size - 1] == piece.offset) {
      places[size - 1] += kBlockBytes;
    } else {
      places.insert(places.end(), {piece.file, piece.offset, piece.bytes});
    }
    is_run = is_block;
  }
  return places;
}

// The pieces of one place; the checksums are the first ones of `sums`, which
// loses them. False: there are no such pieces, or not as many checksums.
bool AddPieces(absl::Span<const int64_t> place,
               absl::Span<const uint32_t>& sums, std::vector<Piece>& pieces) {
  const int64_t file = place[0];
  const int64_t offset = place[1];
  const int64_t bytes = place[2];
  int64_t end = 0;
  if (file < 0 || offset < 0 || bytes <= 0 ||
      __builtin_add_overflow(offset, bytes, &end)) {
    return false;
  }
  const bool is_run = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0;
  const int64_t count = is_run ? bytes / kBlockBytes : 1;
  if (count > static_cast<int64_t>(sums.size())) return false;
  for (int64_t i = 0; i < count; ++i) {
    pieces.push_back({file, offset + i * kBlockBytes,
                      is_run ? kBlockBytes : bytes, sums[i]});
  }
  sums.remove_prefix(count);
  return true;
}

}  // namespace

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
  std::vector<uint32_t> piece_sums;
  AppendList<int64_t>(bytes, PlacesOf(report.pieces, piece_sums));
  AppendList<uint32_t>(bytes, piece_sums);
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
  const std::vector<int64_t> places = reader.TakeList<int64_t>();
  const std::vector<uint32_t> piece_sums = reader.TakeList<uint32_t>();
  valid &= reader.ok() && reader.left() == 0 && code.size() == 1 &&
           sums.size() == 2 && places.size() % 3 == 0;
  absl::Span<const uint32_t> rest = piece_sums;
  for (size_t i = 0; valid && i < places.size(); i += 3) {
    valid = AddPieces(absl::MakeConstSpan(places).subspan(i, 3), rest,
                      report.pieces);
  }
  if (!valid || !rest.empty()) {
    return absl::InternalError(
        "a rank has sent what is no report of a checkpoint: do all run the "
        "same program?");
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
  std::vector<Piece> pieces;
  for (RankReport& report : reports) {
    // The rank's own files are behind all others so far.
    const auto first = static_cast<int64_t>(files.size());
    const auto all = count + static_cast<int64_t>(report.own_files.size());
    for (Piece& piece : report.pieces) {
      if (piece.file < count) continue;
      if (piece.file >= all) {
        return absl::InternalError(absl::StrCat(
            "checksums of file ", piece.file, ", where there are ", all,
            "; this checkpoint is not committed; report a bug"));
      }
      piece.file += first - count;
    }
    files.insert(files.end(), report.own_files.begin(), report.own_files.end());
    pieces.insert(pieces.end(), report.pieces.begin(), report.pieces.end());
    std::vector<Piece>().swap(report.pieces);
  }
  FSDP_ASSIGN_OR_RETURN(auto sums, CombinePieces(std::move(pieces), files));
  std::map<std::string, FileSums> result;
  for (size_t i = 0; i < files.size(); ++i) {
    if (result.emplace(files[i].name, std::move(sums[i])).second) continue;
    return absl::InternalError(absl::StrCat("several ranks have written a ",
                                            files[i].name,
                                            " of their own; report a bug"));
  }
  return result;
}

}  // namespace fsdp::checkpoint
