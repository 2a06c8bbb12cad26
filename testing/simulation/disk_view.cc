#include "testing/simulation/disk_view.h"

#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::simulation {
using checkpoint::File;

// Says that it has synced or written what it has not.
class DiskView::LyingFile final : public File {
 public:
  LyingFile(std::shared_ptr<File> base, DiskView& disk)
      : base_(std::move(base)), disk_(disk) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    return base_->PRead(offset, out);
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    if (disk_.mutant_ != Mutant::kLateWrites) {
      return base_->PWrite(offset, bytes);
    }
    disk_.simulation_.After(absl::Milliseconds(20),
                            [&disk = disk_, base = base_, offset,
                             text = std::string(bytes.data(), bytes.size())] {
                              if (disk.simulation_.IsDead(disk.process_))
                                return;
                              disk.is_late_write_ = true;
                              base->PWrite(offset, text).IgnoreError();
                              disk.is_late_write_ = false;
                            });
    return absl::OkStatus();
  }
  absl::Status SetSize(int64_t bytes) override { return base_->SetSize(bytes); }
  absl::Status Sync() override {
    return disk_.mutant_ == Mutant::kNoSync ? absl::OkStatus() : base_->Sync();
  }
  absl::StatusOr<int64_t> Size() override { return base_->Size(); }

 private:
  const std::shared_ptr<File> base_;
  DiskView& disk_;
};

class DiskView::FileInParts final : public File {
 public:
  FileInParts(std::unique_ptr<File> base, DiskView& disk)
      : base_(std::move(base)), disk_(disk) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    return Move(
        static_cast<int64_t>(out.size()), [&](int64_t begin, int64_t bytes) {
          return base_->PRead(offset + begin, out.subspan(begin, bytes));
        });
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    return Move(
        static_cast<int64_t>(bytes.size()), [&](int64_t begin, int64_t count) {
          return base_->PWrite(offset + begin, bytes.subspan(begin, count));
        });
  }
  absl::Status SetSize(int64_t bytes) override { return base_->SetSize(bytes); }
  absl::Status Sync() override { return base_->Sync(); }
  absl::StatusOr<int64_t> Size() override { return base_->Size(); }
  int64_t direct_bytes() const override { return base_->direct_bytes(); }

 private:
  template <typename MovePart>
  absl::Status Move(int64_t bytes, const MovePart& move_part) {
    Simulation& simulation = disk_.simulation_;
    absl::Status status;
    const auto move = [&](int64_t done) -> ssize_t {
      errno = EINTR;
      if (simulation.Chance(100)) return -1;
      const int64_t left = bytes - done;
      const int64_t part =
          simulation.Chance(500)
              ? left
              : 1 + static_cast<int64_t>(simulation.Random(left));
      status = move_part(done, part);
      errno = EIO;
      return status.ok() ? part : -1;
    };
    if (disk_.mutant_ == Mutant::kShortDiskMoves && bytes > 0) {
      move(0);
    } else {
      checkpoint::MoveAll(bytes, move);
    }
    return status;
  }

  const std::unique_ptr<File> base_;
  DiskView& disk_;
};

void DiskView::Fail(int64_t call, int error, bool for_good) {
  fails_at_ = call;
  error_ = error;
  for_good_ = for_good;
}

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
  return checkpoint::FileError(error_, what, path);
}

absl::Status DiskView::BeforeReading(const std::string& path) {
  simulation_.Event(absl::StrCat("reads ", path));
  if (simulation_.IsDead(process_)) {
    return absl::AbortedError("the process has ended");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> DiskView::OpenForReading(
    const std::string& path, checkpoint::Caching caching) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        ForwardingFileSystem::OpenForReading(path, caching));
  if (!in_parts_) return file;
  return std::make_unique<FileInParts>(std::move(file), *this);
}

absl::StatusOr<std::unique_ptr<File>> DiskView::OpenForWriting(
    const std::string& path, checkpoint::Caching caching) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        ForwardingFileSystem::OpenForWriting(path, caching));
  if (in_parts_) file = std::make_unique<FileInParts>(std::move(file), *this);
  const bool lies = mutant_ == Mutant::kNoSync ||
                    (mutant_ == Mutant::kLateWrites && process_ != 0);
  if (!lies) return file;
  return std::make_unique<LyingFile>(std::move(file), *this);
}

absl::Status DiskView::SyncFolder(const std::string& path) {
  if (mutant_ == Mutant::kNoFolderSync) return absl::OkStatus();
  return ForwardingFileSystem::SyncFolder(path);
}

}  // namespace fsdp::simulation
