// Tests what is left of a file store whose process was killed.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/system_calls.h"
#include "offload/testing/faulty_system.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using Queue = QueueKind;

constexpr int64_t kBlock = 8192;
constexpr int64_t kSize = 9 * kBlock + 1021;

// A process made by fork() that writes an int64_t for each thing it has done.
class Child {
 public:
  // `work` gets the descriptor to write to.
  explicit Child(absl::FunctionRef<void(int)> work) {
    int ends[2];
    FSDP_CHECK(pipe(ends) == 0);
    process_ = fork();
    FSDP_CHECK(process_ >= 0);
    if (process_ == 0) {
      close(ends[0]);
      work(ends[1]);
      _exit(0);
    }
    close(ends[1]);
    report_ = ends[0];
  }
  ~Child() { close(report_); }

  // Returns the next report, or -1 for none, after the process's end.
  int64_t Next() {
    int64_t value = 0;
    const ssize_t bytes = read(report_, &value, sizeof(value));
    return bytes == sizeof(value) ? value : -1;
  }

  // Waits and returns how the process ended; its reports can still be read.
  int Wait() {
    int status = 0;
    FSDP_CHECK(waitpid(process_, &status, 0) == process_);
    return status;
  }

 private:
  pid_t process_ = -1;
  int report_ = -1;
};

void Report(int descriptor, int64_t value) {
  FSDP_CHECK(write(descriptor, &value, sizeof(value)) == sizeof(value));
}

class FileStoreKillTest : public ::testing::TestWithParam<Queue> {
 protected:
  FileStoreKillTest() {
    options_.directory = absl::StrCat(::testing::TempDir(), "/kill_test");
    std::filesystem::remove_all(options_.directory);
    std::filesystem::create_directory(options_.directory);
    options_.capacity = 1 << 18;
    options_.block_bytes = kBlock;
    options_.queue_depth = 4;
    options_.queue = GetParam();
    options_.keep = true;
    options_.max_regions = 4;
  }

  std::string Path() const {
    return absl::StrCat(options_.directory, "/", options_.name);
  }

  // Opens the file, new or as the process before has left it.
  absl::StatusOr<std::unique_ptr<FileStore>> Open() {
    if (std::filesystem::exists(Path())) return FileStore::Reopen(options_);
    return FileStore::Make(options_);
  }

  // Takes step after step: step n writes n, in pieces and in a part of a block,
  // and ends with commit n + 1. The first commit makes the regions.
  absl::Status Train(int report, int64_t steps) {
    FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<FileStore> store, Open());
    if (store->commit() == 0) {
      FSDP_RETURN_IF_ERROR(store->Create("region", kSize));
      FSDP_RETURN_IF_ERROR(store->Create("step", 8));
      FSDP_RETURN_IF_ERROR(Finish(store->Flush()));
      Report(report, store->commit());
    }
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t step = store->commit();
      const std::string bytes = Pattern(step, kSize);
      const absl::string_view all = bytes;
      FSDP_ASSIGN_OR_RETURN(const auto rest,
                            store->Write("region", 5003, all.substr(5003)));
      FSDP_ASSIGN_OR_RETURN(const auto start,
                            store->Write("region", 0, all.substr(0, 5003)));
      FSDP_RETURN_IF_ERROR(WriteNow(*store, "step", 0, all.substr(0, 8)));
      FSDP_RETURN_IF_ERROR(Finish(store->Flush()));
      Report(report, store->commit());
    }
    return absl::OkStatus();
  }

  // Expects that the file holds a finished commit in all its bytes: commit
  // `reported` or, if the process had no time to say so, the one after it.
  void ExpectLastCommit(int64_t reported) {
    ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Reopen(options_));
    const int64_t commit = store->commit();
    ASSERT_GE(commit, reported);
    ASSERT_LE(commit, reported + 1);
    if (commit == 0) {
      EXPECT_TRUE(store->Regions().empty());
      return;
    }
    const std::string bytes =
        commit == 1 ? std::string(kSize, '\0') : Pattern(commit - 1, kSize);
    ASSERT_OK_AND_ASSIGN(const std::string region,
                         ReadNow(*store, "region", 0, kSize));
    ASSERT_OK_AND_ASSIGN(const std::string step, ReadNow(*store, "step", 0, 8));
    EXPECT_TRUE(region == bytes) << "commit " << commit << " is a mixture";
    EXPECT_EQ(step, bytes.substr(0, 8));
  }

  FileStoreOptions options_;
};

INSTANTIATE_TEST_SUITE_P(Queues, FileStoreKillTest,
                         ::testing::Values(Queue::kIoUring, Queue::kThreads),
                         [](const ::testing::TestParamInfo<Queue>& info) {
                           return info.param == Queue::kIoUring ? "uring"
                                                                : "threads";
                         });

TEST_P(FileStoreKillTest, AtEachRequestTheLastCommitIsThere) {
  for (const auto kind : {IoRequest::Kind::kWrite, IoRequest::Kind::kSync}) {
    bool killed = true;
    for (int64_t nth = 0; killed; ++nth) {
      ASSERT_LT(nth, 200);
      std::filesystem::remove(Path());
      FaultySystem system;
      options_.system = &system;
      DiskFault fault;
      fault.kind = kind;
      fault.nth = nth;
      fault.effect = DiskFault::Effect::kKill;
      Child child([&](int report) {
        system.Inject(fault);
        const absl::Status status = Train(report, 3);
        FSDP_CHECK(status.ok());
      });
      killed = WIFSIGNALED(child.Wait());
      options_.system = &SystemCalls::Real();
      int64_t last = 0;
      for (int64_t reported; (reported = child.Next()) > 0;) last = reported;
      // If it was killed while it was made, there is no file, and one can be
      // made.
      if (!std::filesystem::exists(Path())) {
        EXPECT_EQ(last, 0);
        EXPECT_OK(FileStore::Make(options_));
        continue;
      }
      ExpectLastCommit(last);
      EXPECT_EQ(killed, last < 4);
    }
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
