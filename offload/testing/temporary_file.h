// A store in a file that goes with the test.
#ifndef OFFLOAD_TESTING_TEMPORARY_FILE_H_
#define OFFLOAD_TESTING_TEMPORARY_FILE_H_

#include <cstdint>
#include <memory>

#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// Makes a store with blocks of kPageBytes; `capacity` is a multiple of that.
inline std::unique_ptr<ParamStore> TemporaryFile(int64_t capacity) {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = capacity;
  options.block_bytes = kPageBytes;
  return FileStore::Make(options).value();
}

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_TEMPORARY_FILE_H_
