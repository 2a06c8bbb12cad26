#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = Problem::Kind;

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() {
    contents_["large"] = std::string(5 * kBlockBytes + 1, 'x');
    contents_["empty"] = "";
    EXPECT_OK(files_.MakeFolder("/c"));
    manifest_ = *WriteFiles(files_, "/c", 1, contents_);
  }

  std::vector<Problem> Problems() {
    auto problems = VerifyFiles(files_, "/c", manifest_, nullptr);
    EXPECT_OK(problems);
    return *problems;
  }

  void Put(const std::string& name, const std::string& bytes) {
    ASSERT_OK(ReplaceFile(files_, JoinPath("/c", name), bytes));
  }

  SimulatedFileSystem files_;
  Contents contents_ = ContentsOf(1);
  Manifest manifest_;
};

TEST_F(VerifyTest, ASoundOneHasNone) {
  int64_t done = 0;
  int64_t total = 0;
  const auto progress = [&](int64_t now, int64_t of) {
    EXPECT_GT(now, done);
    done = now;
    total = of;
  };
  EXPECT_THAT(*VerifyFiles(files_, "/c", manifest_, progress), IsEmpty());
  EXPECT_EQ(done, total);
  EXPECT_GT(total, 5 * kBlockBytes);
  EXPECT_OK(ProblemsStatus("/c", {}));
}

TEST_F(VerifyTest, EveryKindOfFileAndEveryKindOfDamage) {
  for (const auto& [name, bytes] : contents_) {
    struct Case {
      std::string bytes;
      Kind kind;
    };
    std::vector<Case> cases = {{bytes + "?", Kind::kLonger}};
    if (!bytes.empty()) {
      cases.push_back({bytes.substr(1), Kind::kShorter});
      for (const size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
        cases.push_back({bytes, Kind::kDamaged});
        cases.back().bytes[at] ^= 4;
      }
    }
    for (const Case& test : cases) {
      Put(name, test.bytes);
      const std::vector<Problem> problems = Problems();
      ASSERT_EQ(problems.size(), 1);
      EXPECT_EQ(problems[0].kind, test.kind);
      EXPECT_EQ(problems[0].file, name);
    }
    ASSERT_OK(files_.RemoveFile(JoinPath("/c", name)));
    ASSERT_EQ(Problems().size(), 1);
    EXPECT_EQ(Problems()[0].kind, Kind::kMissing);
    Put(name, bytes);
  }
  EXPECT_THAT(Problems(), IsEmpty());
}

TEST_F(VerifyTest, AllAreListed) {
  std::string damaged = contents_["large"];
  for (const int64_t block : {1, 2, 4}) damaged[block * kBlockBytes] = '!';
  Put("large", damaged);
  Put("optimizer/more", "1");
  Put("trainer.json", "");
  ASSERT_OK(files_.RemoveFile("/c/model.safetensors"));
  EXPECT_THAT(
      ProblemsStatus("/c", Problems()),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr("/c: it is not what its manifest says"),
                     HasSubstr("large: MiB [1, 3) are damaged: CRC32C "),
                     HasSubstr("large: MiB [4, 5) are damaged"),
                     HasSubstr("optimizer/more: is there, and the manifest"),
                     HasSubstr("trainer.json: has 0 bytes instead of 14"),
                     HasSubstr("model.safetensors: is missing"),
                     HasSubstr("Load an older checkpoint."))));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
