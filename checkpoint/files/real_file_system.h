// The disk of this machine.
#ifndef CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Uses Linux' calls: O_DIRECT if the file system has it, fdatasync(2),
// flock(2). Links are followed on the way to a file, but not as its last name
// when something is created or removed.
FileSystem& RealFileSystem();

// Returns `files`, or RealFileSystem() if it is null.
FileSystem& OrReal(FileSystem* files);

// A file of the real file system.

class RealFile : public File {
 public:
  // `flags` are those of open(2), without O_DIRECT.
  static absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path,
                                                    int flags, Caching caching);
  ~RealFile() override;

  absl::Status PRead(int64_t offset, absl::Span<char> out) override;
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override;
  absl::Status SetSize(int64_t bytes) override;
  absl::Status Sync() override;
  absl::StatusOr<int64_t> Size() override;
  int64_t direct_bytes() const override;

 private:
  RealFile(std::string path, int cached, int direct);

  // Returns the descriptor through which such bytes go.
  int DescriptorFor(int64_t offset, const char* memory, int64_t bytes) const;

  const std::string path_;
  const int cached_;
  const int direct_;  // -1: none
  // Cleared if the file system takes the flag but refuses direct calls.
  mutable std::atomic<bool> direct_works_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_
