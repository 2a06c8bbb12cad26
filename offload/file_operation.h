// A transfer of a file store, from the call to its end.
#ifndef OFFLOAD_FILE_OPERATION_H_
#define OFFLOAD_FILE_OPERATION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "offload/io_queue.h"
#include "offload/stored_region.h"
#include "offload/transfer.h"

namespace fsdp::offload {

struct FileOperation;

// The part of an operation that lies in one block. Of the engine's thread.
struct Piece : IoRequest {
  enum class Phase { kReading, kMerging, kWriting };

  FileOperation* operation = nullptr;
  Block* block = nullptr;
  int64_t index = 0;  // of the block
  int64_t begin = 0;  // in the block
  int64_t end = 0;
  char* user = nullptr;    // the caller's memory, of `begin`
  char* bounce = nullptr;  // a block of the engine's memory, or null
  Phase phase = Phase::kReading;
  bool writes = false;
  bool prepared = false;  // `next` has its checksum
  Version next;           // of a write
};

struct FileOperation {
  enum class Kind { kRead, kWrite, kFlush };

  Kind kind = Kind::kRead;
  std::shared_ptr<StoredRegion> region;  // of a read or a write
  int64_t offset = 0;
  char* data = nullptr;
  int64_t bytes = 0;
  // Of a flush: what the store consists of.
  std::vector<std::shared_ptr<StoredRegion>> regions;
  // Called by the engine, before anybody who waits learns of it.
  std::function<void(const absl::Status&)> when_over;

  // "read region 'blocks.3, exp_avg', 4096 bytes from offset 0 on".
  std::string ToString() const;

  void Finish(absl::Status status);
  // DeadlineExceeded, or the result.
  absl::Status Wait(absl::Time deadline);

  // Of the engine's thread.
  std::vector<Piece> pieces;
  int64_t pieces_left = 0;
  absl::Status first_error;
  std::shared_ptr<FileOperation> self;  // while the engine has it

 private:
  absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// The caller's end of it.
class FileTransfer : public Transfer {
 public:
  explicit FileTransfer(std::shared_ptr<FileOperation> operation);
  ~FileTransfer() override;

  absl::Status Wait(absl::Time deadline) override;

 private:
  const std::shared_ptr<FileOperation> operation_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_OPERATION_H_
