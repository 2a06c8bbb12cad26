// File stores in a test's directory: one that is kept and reopened, and one
// that goes with the test.
#ifndef OFFLOAD_TESTING_KEPT_FILE_H_
#define OFFLOAD_TESTING_KEPT_FILE_H_

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/param_store.h"
#include "offload/system_calls.h"

namespace fsdp::offload::testing {

// A base of fixtures. It removes what an earlier test has left under `name`.
class KeptFile {
 protected:
  KeptFile(std::string name, int64_t capacity, int64_t block_bytes,
           QueueKind queue) {
    options_.directory = ::testing::TempDir();
    options_.name = std::move(name);
    options_.capacity = capacity;
    options_.block_bytes = block_bytes;
    options_.queue = queue;
    options_.keep = true;
    options_.max_regions = 8;
    std::filesystem::remove(Path());
  }

  std::string Path() const {
    return absl::StrCat(options_.directory, "/", options_.name);
  }
  std::unique_ptr<FileStore> Make() const {
    return FileStore::Make(options_).value();
  }
  std::unique_ptr<FileStore> Reopen() const {
    return FileStore::Reopen(options_).value();
  }

  FileStoreOptions options_;
};

// Names a test by its queue.
inline std::string QueueName(const ::testing::TestParamInfo<QueueKind>& info) {
  return info.param == QueueKind::kIoUring ? "uring" : "threads";
}

// Makes a store with blocks of kPageBytes; `capacity` is a multiple of that.
inline std::unique_ptr<ParamStore> TemporaryFile(int64_t capacity) {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = capacity;
  options.block_bytes = kPageBytes;
  return FileStore::Make(options).value();
}

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_KEPT_FILE_H_
