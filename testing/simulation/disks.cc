#include "testing/simulation/disks.h"

#include <fcntl.h>
#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"

namespace fsdp::simulation {

// Moves bytes in parts if the disk does, and with mutants says that it has
// synced or written what it has not.
class DiskView::FileView final : public File {
 public:
  FileView(std::shared_ptr<File> base, DiskView& disk)
      : base_(std::move(base)), disk_(disk) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    return Move(out, [&](int64_t begin, absl::Span<char> part) {
      return base_->PRead(offset + begin, part);
    });
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    if (disk_.mutant_ == Mutant::kLateWrites && disk_.process_ != 0) {
      return WriteLate(offset, bytes);
    }
    return Move(bytes, [&](int64_t begin, absl::Span<const char> part) {
      return base_->PWrite(offset + begin, part);
    });
  }
  absl::Status SetSize(int64_t bytes) override { return base_->SetSize(bytes); }
  absl::Status Sync() override {
    return disk_.mutant_ == Mutant::kNoSync ? absl::OkStatus() : base_->Sync();
  }
  absl::StatusOr<int64_t> Size() override { return base_->Size(); }

 private:
  absl::Status WriteLate(int64_t offset, absl::Span<const char> bytes) {
    const auto write = [&disk = disk_, base = base_, offset,
                        text = std::string(bytes.data(), bytes.size())] {
      if (disk.simulation_.IsDead(disk.process_)) return;
      disk.is_late_write_ = true;
      base->PWrite(offset, text).IgnoreError();
      disk.is_late_write_ = false;
    };
    disk_.simulation_.After(absl::Milliseconds(20), write);
    return absl::OkStatus();
  }

  template <typename Bytes, typename MovePart>
  absl::Status Move(Bytes bytes, const MovePart& move_part) {
    if (!disk_.in_parts_) return move_part(0, bytes);
    Simulation& simulation = disk_.simulation_;
    const auto count = static_cast<int64_t>(bytes.size());
    absl::Status status;
    const auto move = [&](int64_t done) -> ssize_t {
      errno = EINTR;
      if (simulation.Chance(100)) return -1;
      const int64_t left = count - done;
      const int64_t part =
          simulation.Chance(500)
              ? left
              : 1 + static_cast<int64_t>(simulation.Random(left));
      status = move_part(done, bytes.subspan(done, part));
      errno = EIO;
      return status.ok() ? part : -1;
    };
    if (disk_.mutant_ == Mutant::kShortDiskMoves && count > 0) {
      move(0);
    } else {
      MoveAll(count, move);
    }
    return status;
  }

  const std::shared_ptr<File> base_;
  DiskView& disk_;
};

absl::Status DiskView::BeforeChange(absl::string_view what,
                                    const std::string& path) {
  if (is_late_write_) return absl::OkStatus();
  simulation_.Event(absl::StrCat(what, " ", path));
  if (simulation_.IsDead(process_)) {
    return absl::AbortedError("the process has ended");
  }
  const int64_t change = changes_++;
  const bool fails =
      fails_at_ >= 0 && (for_good_ ? change >= fails_at_ : change == fails_at_);
  if (!fails) return absl::OkStatus();
  simulation_.Log(absl::StrCat("that fails with error ", error_));
  if (!failed_at_) failed_at_ = simulation_.elapsed_nanos();
  return FileError(error_, what, path);
}

absl::Status DiskView::BeforeReading(const std::string& path) {
  simulation_.Event(absl::StrCat("reads ", path));
  if (simulation_.IsDead(process_)) {
    return absl::AbortedError("the process has ended");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> DiskView::OpenForReading(
    const std::string& path, Caching caching) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        ForwardingFileSystem::OpenForReading(path, caching));
  return std::make_unique<FileView>(std::move(file), *this);
}

absl::StatusOr<std::unique_ptr<File>> DiskView::OpenForWriting(
    const std::string& path, Caching caching) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        ForwardingFileSystem::OpenForWriting(path, caching));
  return std::make_unique<FileView>(std::move(file), *this);
}

absl::Status DiskView::SyncFolder(const std::string& path) {
  if (mutant_ == Mutant::kNoFolderSync) return absl::OkStatus();
  return ForwardingFileSystem::SyncFolder(path);
}

using offload::IoQueue;
using offload::IoRequest;

class SimulatedSsd::Queue final : public IoQueue {
 public:
  Queue(SimulatedSsd& ssd, std::shared_ptr<std::vector<char>> file, int depth)
      : ssd_(ssd), file_(std::move(file)), depth_(depth) {}

  void Start(IoRequest* request) override {
    const int64_t number = ssd_.requests_++;
    const bool fails = number == ssd_.fails_at_;
    // Tears the next write, or shortens the next request that moves bytes.
    const bool tears = ssd_.tears_at_ >= 0 && number >= ssd_.tears_at_ &&
                       request->kind == IoRequest::Kind::kWrite;
    const bool is_mutant =
        ssd_.mutant_ == Mutant::kShortSsdMoves && number % 8 == 7;
    const bool shortens = (is_mutant || (ssd_.shortens_at_ >= 0 &&
                                         number >= ssd_.shortens_at_)) &&
                          request->kind != IoRequest::Kind::kSync;
    if (tears) ssd_.tears_at_ = -1;
    if (shortens) ssd_.shortens_at_ = -1;
    const bool lies = tears || (shortens && is_mutant);
    if (fails || tears || (shortens && !lies)) {
      ssd_.failed_at_ = ssd_.simulation_.elapsed_nanos();
      ssd_.simulation_.Log(fails   ? "a request of the SSD fails"
                           : tears ? "a write to the SSD is torn"
                                   : "a request of the SSD is done in part");
    }
    Simulation& simulation = ssd_.simulation_;
    const bool at_once = simulation.Chance(400);
    // A small model has its values in the front of its pages.
    const int64_t bytes = tears || shortens
                              ? static_cast<int64_t>(simulation.Random(
                                    std::min<int64_t>(request->bytes, 256)))
                              : request->bytes;
    if (at_once && !fails) Move(*request, bytes);
    simulation.After(simulation.RandomDelay(absl::Milliseconds(2)), [=] {
      if (!at_once && !fails) Move(*request, bytes);
      if (fails) request->result = -EIO;
      if (lies) request->result = request->bytes;
      over_.push_back(request);
    });
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    ssd_.simulation_.Block([this] { return woken_ || !over_.empty(); },
                           absl::InfiniteFuture());
    std::swap(over, over_);
    woken_ = false;
  }

  void Wake() override { woken_ = true; }
  int depth() const override { return depth_; }
  std::string Describe() const override { return "simulated"; }

 private:
  // Moves bytes as pread(2) and pwrite(2) do in a file that keeps its size.
  void Move(IoRequest& request, int64_t bytes) const {
    const int64_t left = int64_t(file_->size()) - request.offset;
    const int64_t moved =
        std::clamp<int64_t>(bytes, 0, std::max<int64_t>(left, 0));
    char* const place = file_->data() + request.offset;
    if (request.kind == IoRequest::Kind::kRead) {
      std::memcpy(request.data, place, moved);
    } else if (request.kind == IoRequest::Kind::kWrite) {
      std::memcpy(place, request.data, moved);
    }
    request.result = request.kind == IoRequest::Kind::kSync ? 0 : moved;
  }

  SimulatedSsd& ssd_;
  const std::shared_ptr<std::vector<char>> file_;
  const int depth_;
  std::vector<IoRequest*> over_;
  bool woken_ = false;
};

int SimulatedSsd::Open(const std::string& /*path*/, int /*flags*/) {
  const int descriptor = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  files_[descriptor] = std::make_shared<std::vector<char>>();
  return descriptor;
}

int64_t SimulatedSsd::FreeBytes(int /*descriptor*/) { return int64_t{1} << 30; }

int SimulatedSsd::Allocate(int descriptor, int64_t bytes) {
  files_.at(descriptor)->resize(bytes);
  return 0;
}

absl::StatusOr<std::unique_ptr<IoQueue>> SimulatedSsd::MakeQueue(
    offload::QueueKind /*kind*/, int descriptor, int depth) {
  return std::make_unique<Queue>(*this, files_.at(descriptor), depth);
}

}  // namespace fsdp::simulation
