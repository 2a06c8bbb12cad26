// A file or folder that appears under its name once it is whole.
#ifndef TOOLS_CHECKPOINT_NEW_OUTPUT_H_
#define TOOLS_CHECKPOINT_NEW_OUTPUT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

// Thread-compatible.
class NewOutput {
 public:
  enum class Kind { kFile, kFolder };

  // Makes "`path`.incomplete" where it is to be a folder. AlreadyExists for one
  // of the two names; ResourceExhausted if the disk has less than `bytes`.
  static absl::StatusOr<NewOutput> Create(FileSystem& files,
                                          const std::string& path, Kind kind,
                                          int64_t bytes);
  NewOutput(NewOutput&& other) noexcept;
  NewOutput& operator=(NewOutput&&) = delete;
  // Without Commit() nothing remains.
  ~NewOutput();

  // Where to write, and to sync what was written.
  const std::string& path() const { return incomplete_; }
  // Once. It has its name by then, also after a loss of power.
  absl::Status Commit();

 private:
  NewOutput(FileSystem& files, std::string path, Kind kind);

  FileSystem* files_;  // null: committed, or moved from
  std::string path_;
  std::string incomplete_;
  Kind kind_;
};

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_NEW_OUTPUT_H_
