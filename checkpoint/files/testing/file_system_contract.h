// The tests that every FileSystem passes.
#ifndef CHECKPOINT_FILES_TESTING_FILE_SYSTEM_CONTRACT_H_
#define CHECKPOINT_FILES_TESTING_FILE_SYSTEM_CONTRACT_H_

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/files/file_system.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {

// A test links :file_system_contract and names one for each way of making it:
//   INSTANTIATE_TEST_SUITE_P(Real, FileSystemContract, ::testing::Values(...));
struct FileSystemUnderTest {
  // Also keeps what has to live as long as the file system.
  std::function<std::shared_ptr<FileSystem>()> make;
  std::string folder;  // an empty one is made there
};

class FileSystemContract
    : public ::testing::TestWithParam<FileSystemUnderTest> {
 protected:
  void SetUp() override;
  void TearDown() override;

  std::string Path(const std::string& name) const {
    return JoinPath(folder_, name);
  }

  std::shared_ptr<FileSystem> files_;
  std::string folder_;
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_FILE_SYSTEM_CONTRACT_H_
