#include "testing/simulation/attempt_faults.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <regex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "testing/simulation/rank_training.h"

namespace fsdp::simulation {

namespace {

constexpr char kRoot[] = "/run";

std::vector<std::pair<std::string, int64_t>> FilesBelow(
    FileSystem& disk, const std::string& folder) {
  std::vector<std::pair<std::string, int64_t>> files;
  const auto names = disk.List(folder);
  if (!names.ok()) return files;
  for (const std::string& name : *names) {
    const std::string path = JoinPath(folder, name);
    const auto info = disk.Stat(path);
    FSDP_CHECK(info.ok());
    if (info->kind == FileInfo::Kind::kFolder) {
      const auto more = FilesBelow(disk, path);
      files.insert(files.end(), more.begin(), more.end());
    } else if (info->bytes > 0) {
      files.emplace_back(path, info->bytes);
    }
  }
  return files;
}

// Returns "" if there is none.
std::string NewestCheckpoint(FileSystem& disk) {
  std::string newest;
  int64_t newest_step = -1;
  const auto names = disk.List(kRoot);
  if (!names.ok()) return newest;
  for (const std::string& name : *names) {
    absl::string_view rest = name;
    int64_t step = 0;
    if (!absl::ConsumePrefix(&rest, "step-")) continue;
    if (!absl::SimpleAtoi(rest, &step) || step <= newest_step) continue;
    newest_step = step;
    newest = JoinPath(kRoot, name);
  }
  return newest;
}

std::string ReadAll(FileSystem& disk, const std::string& path) {
  const auto file = disk.OpenForReading(path, Caching::kCached);
  FSDP_CHECK(file.ok());
  std::string bytes(disk.Stat(path)->bytes, '\0');
  FSDP_CHECK((*file)->PRead(0, absl::MakeSpan(bytes)).ok());
  return bytes;
}

void Turn(FileSystem& disk, const std::string& path, int64_t bit) {
  std::string bytes = ReadAll(disk, path);
  char& byte = bytes[bit / 8];
  byte = static_cast<char>(byte ^ (1 << (bit % 8)));
  const auto file = disk.OpenForWriting(path, Caching::kCached);
  FSDP_CHECK(file.ok());
  FSDP_CHECK((*file)->PWrite(bit / 8, absl::MakeSpan(&byte, 1)).ok());
  FSDP_CHECK((*file)->Sync().ok());
}

bool IsOfEvents(FaultKind kind) {
  switch (kind) {
    case FaultKind::kThrow:
    case FaultKind::kDiskFull:
    case FaultKind::kDiskError:
    case FaultKind::kSsdError:
    case FaultKind::kSsdTorn:
    case FaultKind::kSsdShort:
    case FaultKind::kRot:
    case FaultKind::kNotFinite:
    case FaultKind::kFinish:
      return false;
    default:
      return true;
  }
}

constexpr absl::string_view kTooLate = "not done at the deadline";

bool Has(absl::string_view text,
         std::initializer_list<absl::string_view> parts) {
  return std::all_of(parts.begin(), parts.end(), [text](absl::string_view p) {
    return absl::StrContains(text, p);
  });
}

// Returns whether `text` says that others miss the rank: it is gone, has given
// up, or has not come. `rank` is its number in the world, which may differ from
// that in its group, as in "rank 1 (world rank 5)".
bool NamesLostRank(absl::string_view text, int rank) {
  const std::string name = absl::StrCat(
      "(\\brank ", rank, "\\b(?! \\(world rank )|\\(world rank ", rank,
      "\\))( \\((last seen in|no call so far)[^()]*(\\(\\))?\\))?");
  return std::regex_search(
      text.begin(), text.end(),
      std::regex(absl::StrCat(name, " (is gone|aborted:|gave up waiting for)|",
                              "still missing: [^;\n]*", name)));
}

bool HasDamage(const absl::Status& error) {
  return absl::IsDataLoss(error) || Has(error.message(), {"CRC32C"});
}

}  // namespace

AttemptFaults::AttemptFaults(Simulation& simulation, Network& network,
                             const Attempt& attempt)
    : simulation_(simulation),
      network_(network),
      attempt_(attempt),
      happened_(attempt.faults.size(), false),
      last_(absl::Nanoseconds(simulation.elapsed_nanos())) {
  simulation_.set_on_event(
      [this](int process, int64_t number) { OnEvent(process, number); });
}

AttemptFaults::~AttemptFaults() { simulation_.set_on_event(nullptr); }

void AttemptFaults::Plant(int rank, DiskView& disk, SimulatedSsd& ssd) {
  for (const Fault& fault : attempt_.faults) {
    if (fault.rank != rank) continue;
    switch (fault.kind) {
      case FaultKind::kDiskFull:
        disk.Fail(fault.at, ENOSPC, /*for_good=*/true);
        break;
      case FaultKind::kDiskError:
        disk.Fail(fault.at, EIO, /*for_good=*/false);
        break;
      case FaultKind::kSsdError:
        ssd.Fail(fault.at);
        break;
      case FaultKind::kSsdTorn:
        ssd.Tear(fault.at);
        break;
      case FaultKind::kSsdShort:
        ssd.Shorten(fault.at);
        break;
      default:
        break;
    }
  }
}

void AttemptFaults::PlantRot(FileSystem& disk) {
  for (size_t i = 0; i < happened_.size(); ++i) {
    const Fault& fault = attempt_.faults[i];
    if (fault.kind != FaultKind::kRot) continue;
    const std::string newest = NewestCheckpoint(disk);
    if (newest.empty()) return;
    const auto files = FilesBelow(disk, newest);
    if (files.empty()) return;
    const auto& [path, bytes] = files[fault.at % int64_t(files.size())];
    rotten_path_ = path;
    rotten_bit_ = fault.at * 7919 % (bytes * 8);
    Turn(disk, rotten_path_, rotten_bit_);
    rotten_bytes_ = ReadAll(disk, rotten_path_);
    happened_[i] = true;
    return;  // one at a time
  }
}

void AttemptFaults::RemoveRot(FileSystem& disk) {
  if (rotten_path_.empty()) return;
  // A checkpoint saved meanwhile may have taken its place.
  if (disk.Stat(rotten_path_).ok() &&
      ReadAll(disk, rotten_path_) == rotten_bytes_) {
    Turn(disk, rotten_path_, rotten_bit_);
  }
  rotten_path_.clear();
}

std::optional<int64_t> AttemptFaults::PlaceOf(FaultKind kind, int rank) const {
  for (const Fault& fault : attempt_.faults) {
    if (fault.rank == rank && fault.kind == kind) return fault.at;
  }
  return std::nullopt;
}

int AttemptFaults::SignalOf(int rank) const {
  const bool is_told = HasHappened([rank](const Fault& fault) {
    return fault.rank == rank && fault.kind == FaultKind::kSignal;
  });
  return is_told ? SIGTERM : 0;
}

bool AttemptFaults::AllEndAlike() const {
  return std::any_of(attempt_.faults.begin(), attempt_.faults.end(),
                     [](const Fault& fault) {
                       return fault.kind == FaultKind::kSignal ||
                              fault.kind == FaultKind::kNotFinite;
                     });
}

void AttemptFaults::Collect(int rank, const DiskView& disk,
                            const SimulatedSsd& ssd,
                            std::optional<int64_t> thrown_at) {
  for (size_t i = 0; i < happened_.size(); ++i) {
    const Fault& fault = attempt_.faults[i];
    if (fault.rank != rank || IsOfEvents(fault.kind)) continue;
    if (fault.kind == FaultKind::kRot) continue;
    // If the run has begun behind the step, the fault is nobody's.
    if (fault.kind == FaultKind::kNotFinite ||
        fault.kind == FaultKind::kFinish) {
      happened_[i] = true;
      continue;
    }
    const bool is_disk = fault.kind == FaultKind::kDiskFull ||
                         fault.kind == FaultKind::kDiskError;
    const std::optional<int64_t> at = fault.kind == FaultKind::kThrow
                                          ? thrown_at
                                      : is_disk ? disk.failed_at()
                                                : ssd.failed_at();
    happened_[i] = at.has_value();
    if (at.has_value()) last_ = std::max(last_, absl::Nanoseconds(*at));
  }
}

void AttemptFaults::OnEvent(int rank, int64_t number) {
  for (size_t i = 0; i < happened_.size(); ++i) {
    const Fault& fault = attempt_.faults[i];
    if (happened_[i] || fault.rank != rank || fault.at != number) continue;
    if (!IsOfEvents(fault.kind)) continue;
    happened_[i] = true;
    Trigger(fault);
  }
}

void AttemptFaults::Trigger(const Fault& fault) {
  absl::Duration lasts = absl::ZeroDuration();
  switch (fault.kind) {
    case FaultKind::kKill:
    case FaultKind::kSilence:
      simulation_.Kill(fault.rank);
      network_.ProcessDied(fault.rank);
      break;
    case FaultKind::kLosePower:
      for (int rank = 0; rank < attempt_.world_size; ++rank) {
        simulation_.Kill(rank);
      }
      break;
    case FaultKind::kStop:
    case FaultKind::kLongStop:
      simulation_.Stop(fault.rank, fault.duration);
      lasts = fault.duration;
      break;
    case FaultKind::kSlow:
      simulation_.Slow(fault.rank, 10);
      break;
    case FaultKind::kSignal:
      break;  // SignalOf() tells
    default:
      simulation_.JumpClock(fault.duration);
      lasts = std::max(fault.duration, -fault.duration);
  }
  last_ =
      std::max(last_, absl::Nanoseconds(simulation_.elapsed_nanos()) + lasts);
}

std::vector<Fault> AttemptFaults::Happened() const {
  std::vector<Fault> faults;
  for (size_t i = 0; i < happened_.size(); ++i) {
    if (happened_[i]) faults.push_back(attempt_.faults[i]);
  }
  return faults;
}

bool AttemptFaults::HasHappened(
    const std::function<bool(const Fault&)>& is_it) const {
  const std::vector<Fault> happened = Happened();
  return std::any_of(happened.begin(), happened.end(), is_it);
}

bool AttemptFaults::any_that_may_fail() const {
  return HasHappened([](const Fault& fault) {
    return fault.kind != FaultKind::kStop && fault.kind != FaultKind::kSlow;
  });
}

bool AttemptFaults::power_is_lost() const {
  return HasHappened(
      [](const Fault& fault) { return fault.kind == FaultKind::kLosePower; });
}

bool IsNamedBy(const Fault& fault, const absl::Status& error) {
  const absl::string_view text = error.message();
  switch (fault.kind) {
    case FaultKind::kKill:
    case FaultKind::kSilence:
    case FaultKind::kFinish:
      return NamesLostRank(text, fault.rank);
    case FaultKind::kLongStop:
      return NamesLostRank(text, fault.rank) || Has(text, {kTooLate}) ||
             Has(text, {absl::StrCat("rank ", fault.rank,
                                     " has waited for its disk for ")});
    case FaultKind::kClockJump:
      return Has(text, {kTooLate});
    case FaultKind::kThrow:
      return Has(text, {kUsersError}) || NamesLostRank(text, fault.rank);
    case FaultKind::kDiskFull:
      return Has(text, {"/run", "No space left on device"});
    case FaultKind::kDiskError:
      return Has(text, {"/run", "Input/output error"});
    case FaultKind::kRot:
      return Has(text, {"/run"}) && HasDamage(error);
    case FaultKind::kSsdError:
      return Has(text, {"/ssd", "Input/output error"});
    case FaultKind::kSsdTorn:
      return Has(text, {"/ssd"}) && HasDamage(error);
    case FaultKind::kSsdShort:
      return Has(text, {"/ssd"}) &&
             (Has(text, {"bytes were written"}) || Has(text, {"ends after"}));
    case FaultKind::kNotFinite:
      return Has(text,
                 {absl::StrCat("the loss of rank ", fault.rank, " is nan")});
    case FaultKind::kSignal:
      return Has(text, {"stopped by signal 15"});
    case FaultKind::kStop:
    case FaultKind::kSlow:
    case FaultKind::kLosePower:
      return false;  // nobody has to notice, or nobody is left who could
  }
  return false;
}

std::vector<int> RanksThatSayNothing(const std::vector<Fault>& faults,
                                     const std::vector<absl::Status>& ends) {
  std::vector<int> silent;
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    if (ends[rank].ok()) continue;
    const bool tells = std::any_of(
        faults.begin(), faults.end(),
        [&](const Fault& fault) { return IsNamedBy(fault, ends[rank]); });
    (tells ? lost : silent).push_back(rank);
  }
  // A rank whose error names a lost rank counts as lost, too.
  for (size_t i = 0; i < lost.size(); ++i) {
    const auto told =
        std::stable_partition(silent.begin(), silent.end(), [&](int rank) {
          return !NamesLostRank(ends[rank].message(), lost[i]);
        });
    lost.insert(lost.end(), told, silent.end());
    silent.erase(told, silent.end());
  }
  return silent;
}

}  // namespace fsdp::simulation
