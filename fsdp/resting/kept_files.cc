#include "fsdp/resting/kept_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using offload::FileStore;
using offload::FileStoreOptions;

constexpr char kWhat[] = "opening kept files";
constexpr char kBeginAnew[] = "or remove the run's files to begin anew";

struct Found {
  int64_t run = 0;  // 0 if there is no such file
  KeptStage stage;
};

std::string PathOf(const FileStoreOptions& file) {
  return absl::StrCat(file.directory, "/", file.name);
}

std::string RunText(int64_t run) {
  return absl::StrCat("run ", absl::Hex(run, absl::kZeroPad16));
}

std::string PlaceText(int rank, int world_size) {
  return absl::StrCat(rank, "-of-", world_size);
}

// Returns the number of ranks of the run to which a file called `name` belongs,
// if that is `prefix` and a PlaceText(); else nullopt.
std::optional<int> RanksOf(absl::string_view name, absl::string_view prefix) {
  int rank = 0;
  int ranks = 0;
  if (!absl::ConsumePrefix(&name, prefix)) return std::nullopt;
  const std::vector<absl::string_view> parts = absl::StrSplit(name, "-of-");
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &rank) ||
      !absl::SimpleAtoi(parts[1], &ranks)) {
    return std::nullopt;
  }
  return ranks;
}

// Refuses files of a run on another number of ranks: this run would begin anew
// beside them.
absl::Status CheckRankCount(const FileStoreOptions& file,
                            const comm::Communicator& world) {
  const int ranks = world.world_size();
  const absl::string_view prefix =
      absl::StripSuffix(file.name, PlaceText(world.rank(), ranks));
  std::error_code error;
  for (std::filesystem::directory_iterator entry(file.directory, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    const std::optional<int> of = RanksOf(name, prefix);
    if (!of.has_value() || *of == ranks) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        file.directory, "/", name, " is of a run on ", *of,
        " ranks, and this one has ", ranks, ": go on with ", *of,
        ", give this run another OffloadOptions::name, ", kBeginAnew));
  }
  return absl::OkStatus();
}

// Opens the files that one rank has of a run.
class Opening {
 public:
  Opening(const std::vector<FileStoreOptions>& files, comm::Communicator& world,
          absl::Duration timeout)
      : files_(files),
        world_(world),
        timeout_(timeout),
        stores_(files.size()),
        mine_(files.size()) {}

  absl::StatusOr<KeptFiles> Open() {
    FSDP_RETURN_IF_ERROR(Agree(OpenThoseThere()));
    FSDP_ASSIGN_OR_RETURN(std::vector<Found> all, FoundByAll());
    FSDP_RETURN_IF_ERROR(Agree(CheckOneRun(all)));
    KeptFiles kept;
    FSDP_ASSIGN_OR_RETURN(kept.session, DrawTogether());
    const auto there = FirstThere(all);
    const bool is_new = there == all.end();
    FSDP_RETURN_IF_ERROR(Agree(
        MakeOthers(is_new ? kept.session : static_cast<uint64_t>(there->run))));
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Found& found : all) least = std::min(least, found.stage.number);
    FSDP_RETURN_IF_ERROR(Agree(GoBack(least)));
    FSDP_ASSIGN_OR_RETURN(all, FoundByAll());
    FSDP_RETURN_IF_ERROR(Agree(CheckOneStage(all)));
    kept.stage = all.front().stage;
    kept.stores = std::move(stores_);
    return kept;
  }

 private:
  absl::Time Deadline() const { return absl::Now() + timeout_; }

  absl::Status Agree(const absl::Status& mine) {
    return comm::Agree(world_, mine, kWhat, Deadline());
  }

  // Opens existing files at their last commits.
  absl::Status OpenThoseThere() {
    for (size_t i = 0; i < files_.size(); ++i) {
      FSDP_RETURN_IF_ERROR(CheckRankCount(files_[i], world_));
      absl::StatusOr<std::unique_ptr<FileStore>> store =
          FileStore::Reopen(files_[i]);
      if (absl::IsNotFound(store.status())) continue;
      FSDP_RETURN_IF_ERROR(store.status());
      stores_[i] = *std::move(store);
      FSDP_RETURN_IF_ERROR(Look(i));
    }
    return absl::OkStatus();
  }

  absl::Status Look(size_t i) {
    mine_[i].run = static_cast<int64_t>(stores_[i]->run());
    mine_[i].stage = KeptStage();
    char bytes[sizeof(KeptStage)];
    absl::StatusOr<std::unique_ptr<offload::Transfer>> read =
        stores_[i]->Read(kStageRegion, 0, absl::MakeSpan(bytes));
    if (absl::IsNotFound(read.status())) return absl::OkStatus();
    FSDP_RETURN_IF_ERROR(read.status());
    FSDP_RETURN_IF_ERROR((*read)->Wait(Deadline()));
    std::memcpy(&mine_[i].stage, bytes, sizeof(bytes));
    return absl::OkStatus();
  }

  // Returns what all ranks have found: by rank, then in the order of `files`.
  absl::StatusOr<std::vector<Found>> FoundByAll() {
    static_assert(sizeof(Found) == 4 * sizeof(int64_t));
    const auto count = static_cast<int64_t>(4 * mine_.size());
    const at::Tensor in = at::empty({count}, at::kLong);
    std::memcpy(in.mutable_data_ptr(), mine_.data(), in.nbytes());
    const at::Tensor out = at::empty({count * world_.world_size()}, at::kLong);
    FSDP_ASSIGN_OR_RETURN(auto work, world_.AllGather(out, in, kWhat));
    FSDP_RETURN_IF_ERROR(work->Wait(Deadline()));
    std::vector<Found> all(mine_.size() * world_.world_size());
    std::memcpy(all.data(), out.const_data_ptr(), out.nbytes());
    return all;
  }

  static std::vector<Found>::const_iterator FirstThere(
      const std::vector<Found>& all) {
    return std::find_if(all.begin(), all.end(),
                        [](const Found& found) { return found.run != 0; });
  }

  // Reports what is wrong with a file of this rank, before any commit is given
  // up.
  absl::Status CheckOneRun(const std::vector<Found>& all) const {
    const auto first = FirstThere(all);
    if (first == all.end()) return absl::OkStatus();
    const auto latest = std::max_element(
        all.begin(), all.end(),
        [](auto& a, auto& b) { return a.stage.number < b.stage.number; });
    for (size_t i = 0; i < files_.size(); ++i) {
      const Found& found = mine_[i];
      // A run that was killed while it made its files has finished no step.
      if (found.run == 0 && latest->stage.number == 0) continue;
      if (found.run != 0 && found.run != first->run) {
        return absl::FailedPreconditionError(absl::StrCat(
            PathOf(files_[i]), " is of ", RunText(found.run), ", and rank ",
            RankOf(first - all.begin()), "'s files are of ",
            RunText(first->run),
            ": files of different runs do not make a model; put back those "
            "that belong together, ",
            kBeginAnew));
      }
      if (latest->stage.number - found.stage.number <= 1 && found.run != 0) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          PathOf(files_[i]),
          found.run == 0
              ? std::string(" is not there")
              : absl::StrCat(" is of step ", found.stage.finished_step),
          ", and files of rank ", RankOf(latest - all.begin()), " are of step ",
          latest->stage.finished_step,
          ": it was lost or replaced; put it back, ", kBeginAnew));
    }
    return absl::OkStatus();
  }

  // Must run after all files have gone back to the least number.
  absl::Status CheckOneStage(const std::vector<Found>& all) const {
    for (size_t i = 0; i < files_.size(); ++i) {
      if (mine_[i].stage == all.front().stage) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          PathOf(files_[i]), " is of commit ", mine_[i].stage.number,
          ", after step ", mine_[i].stage.finished_step,
          ", and rank 0's files are of commit ", all.front().stage.number,
          ", after step ", all.front().stage.finished_step,
          ", of another continuation of the run: they are of copies that both "
          "went on, or some were replaced; put back those that belong "
          "together, ",
          kBeginAnew));
    }
    return absl::OkStatus();
  }

  int RankOf(int64_t index) const {
    return static_cast<int>(index / static_cast<int64_t>(files_.size()));
  }

  // Returns a random number of rank 0, other than 0, on all ranks.
  absl::StatusOr<uint64_t> DrawTogether() {
    std::random_device random;
    const uint64_t mine = (uint64_t{random()} << 32) | random() | 1;
    FSDP_ASSIGN_OR_RETURN(const std::string text,
                          comm::BroadcastString(world_, absl::StrCat(mine),
                                                /*root=*/0, kWhat, Deadline()));
    uint64_t number = 0;
    FSDP_CHECK(absl::SimpleAtoi(text, &number));
    return number;
  }

  absl::Status MakeOthers(uint64_t run) {
    for (size_t i = 0; i < files_.size(); ++i) {
      if (stores_[i] != nullptr) continue;
      FileStoreOptions file = files_[i];
      file.run = run;
      FSDP_ASSIGN_OR_RETURN(stores_[i], FileStore::Make(file));
      FSDP_RETURN_IF_ERROR(Look(i));
    }
    return absl::OkStatus();
  }

  // Reopens files that are ahead of commit `number` one commit earlier.
  absl::Status GoBack(int64_t number) {
    for (size_t i = 0; i < files_.size(); ++i) {
      if (mine_[i].stage.number == number) continue;
      const int64_t commit = stores_[i]->commit();
      stores_[i].reset();  // a file can be open only once
      FSDP_ASSIGN_OR_RETURN(stores_[i],
                            FileStore::Reopen(files_[i], commit - 1));
      FSDP_RETURN_IF_ERROR(Look(i));
    }
    return absl::OkStatus();
  }

  const std::vector<FileStoreOptions>& files_;
  comm::Communicator& world_;
  const absl::Duration timeout_;
  std::vector<std::unique_ptr<FileStore>> stores_;  // null until open
  std::vector<Found> mine_;
};

}  // namespace

std::string KeptFileName(absl::string_view run, absl::string_view kind,
                         int rank, int world_size) {
  return absl::StrCat(run, ".", kind, ".", PlaceText(rank, world_size));
}

absl::StatusOr<KeptFiles> OpenKeptFiles(
    const std::vector<FileStoreOptions>& files, comm::Communicator& world,
    absl::Duration timeout) {
  return Opening(files, world, timeout).Open();
}

}  // namespace fsdp
