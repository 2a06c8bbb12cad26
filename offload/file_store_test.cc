#include "offload/file_store.h"

#include <fcntl.h>

#include <filesystem>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "offload/testing/param_store_contract.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Queue = QueueKind;

FileStoreOptions Options() {
  FileStoreOptions options;
  options.directory = ::testing::TempDir();
  options.capacity = 1 << 20;
  return options;
}

// Removes what an earlier run has left.
void RemoveKept(const FileStoreOptions& options) {
  std::filesystem::remove(absl::StrCat(options.directory, "/", options.name));
}

StoreUnderTest With(std::string name,
                    std::function<void(FileStoreOptions&)> change) {
  FileStoreOptions changed;
  change(changed);
  return {std::move(name),
          [change = std::move(change)](int64_t capacity) {
            static int files = 0;
            FileStoreOptions options = Options();
            options.name = absl::StrCat("contract_", files++);
            RemoveKept(options);
            options.capacity = capacity;
            change(options);
            return FileStore::Make(options);
          },
          /*can_roll_back=*/changed.keep || changed.rollback};
}

INSTANTIATE_TEST_SUITE_P(
    File, ParamStoreContract,
    ::testing::Values(
        With("uring",
             [](FileStoreOptions& options) {
               options.queue = Queue::kIoUring;
             }),
        With("threads",
             [](FileStoreOptions& options) {
               options.queue = Queue::kThreads;
             }),
        With("small_blocks",
             [](FileStoreOptions& options) {
               options.block_bytes = 4096;
               options.queue_depth = 64;
             }),
        With("one_at_a_time",
             [](FileStoreOptions& options) {
               options.block_bytes = 12288;
               options.queue_depth = 1;
             }),
        With("large_blocks",
             [](FileStoreOptions& options) {
               options.block_bytes = 16 << 20;
               options.queue_depth = 2;
             }),
        With("with_rollback",
             [](FileStoreOptions& options) {
               options.rollback = true;
               options.block_bytes = 8192;
             }),
        With("with_rollback_by_threads",
             [](FileStoreOptions& options) {
               options.rollback = true;
               options.queue = Queue::kThreads;
             }),
        With("kept", [](FileStoreOptions& options) { options.keep = true; }),
        With("kept_by_threads",
             [](FileStoreOptions& options) {
               options.keep = true;
               options.queue = Queue::kThreads;
               options.block_bytes = 65536;
             })),
    StoreName);

TEST(UringQueueTest, SaysWhyTheKernelRefuses) {
  EXPECT_THAT(SystemCalls::Real().MakeQueue(Queue::kIoUring, 0, 1 << 20),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("io_uring refused: ")));
}

TEST(FileStoreTest, RefusesOptionsThatCannotBe) {
  const std::vector<
      std::pair<std::string, std::function<void(FileStoreOptions&)>>>
      cases = {
          {"capacity of -1", [](auto& options) { options.capacity = -1; }},
          {"blocks of 0", [](auto& options) { options.block_bytes = 0; }},
          {"blocks of 5000", [](auto& options) { options.block_bytes = 5000; }},
          {"depth of 0", [](auto& options) { options.queue_depth = 0; }},
          {"depth of 1025", [](auto& options) { options.queue_depth = 1025; }},
          {"'a/b'",
           [](auto& options) {
             options.keep = true;
             options.name = "a/b";
           }},
          {"1025 bytes",
           [](auto& options) { options.owner = std::string(1025, 'x'); }},
          {"0 regions",
           [](auto& options) {
             options.keep = true;
             options.max_regions = 0;
           }},
      };
  for (const auto& [text, change] : cases) {
    FileStoreOptions options = Options();
    change(options);
    EXPECT_THAT(FileStore::Make(options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(text), HasSubstr(options.directory))));
  }
}

TEST(FileStoreTest, SaysWhereThereIsNoDirectory) {
  FileStoreOptions options = Options();
  options.directory += "/nowhere";
  for (const bool keep : {false, true}) {
    options.keep = keep;
    EXPECT_THAT(FileStore::Make(options),
                StatusIs(absl::StatusCode::kNotFound,
                         AllOf(HasSubstr(options.directory),
                               HasSubstr("make the directory"))));
  }
}

TEST(FileStoreTest, RefusesWhatTheDiskHasNoRoomFor) {
  FileStoreOptions options = Options();
  options.capacity = int64_t{1} << 50;
  EXPECT_THAT(FileStore::Make(options),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr(absl::StrCat(options.capacity)),
                             HasSubstr("are available"),
                             HasSubstr(options.directory))));
}

TEST(FileStoreTest, ScratchHasNoNameAndItsSpaceIsReserved) {
  const std::string directory =
      absl::StrCat(::testing::TempDir(), "/scratch_only");
  std::filesystem::create_directory(directory);
  FileStoreOptions options = Options();
  options.directory = directory;
  ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Make(options));
  ASSERT_OK(store->Create("region", 1 << 20));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 1 << 20)));
  EXPECT_TRUE(std::filesystem::is_empty(directory));
}

TEST(FileStoreTest, AKeptFileHasTwoPlacesAndWhatSaysSo) {
  FileStoreOptions options = Options();
  options.capacity = 100001;
  options.queue_depth = 3;
  options.block_bytes = 12288;
  options.keep = true;
  options.name = "how_much";
  RemoveKept(options);
  ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Make(options));
  const auto file = options.directory + "/how_much";
  EXPECT_GT(std::filesystem::file_size(file), 2 * 102400);
  EXPECT_LT(std::filesystem::file_size(file), 2 * 102400 + (4 << 20));
}

// io_uring cancels what a thread has started when the thread ends.
TEST(FileStoreTest, OutlivesTheThreadThatMadeIt) {
  std::unique_ptr<FileStore> store;
  std::thread([&] { store = *FileStore::Make(Options()); }).join();
  ASSERT_OK(store->Create("region", 100003));
  std::thread([&] {
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 100003)));
  }).join();
  EXPECT_EQ(*ReadNow(*store, "region", 0, 100003), Pattern(1, 100003));
}

TEST(FileStoreTest, DescribesWhatItDoes) {
  FileStoreOptions options = Options();
  options.queue = Queue::kThreads;
  EXPECT_THAT((*FileStore::Make(options))->Describe(),
              AllOf(HasSubstr(options.directory), HasSubstr("1048576 bytes"),
                    HasSubstr("8 threads")));
  options.queue = std::nullopt;
  EXPECT_THAT((*FileStore::Make(options))->Describe(),
              AllOf(HasSubstr("io_uring, 8 in flight"), HasSubstr("CRC32C")));
  options.rollback = true;
  EXPECT_THAT((*FileStore::Make(options))->Describe(),
              HasSubstr("1048576 bytes in two places, blocks"));
}

// A system that has nothing but what POSIX promises.
class PlainSystem : public SystemCalls {
 public:
  int Open(const std::string& path, int flags) override {
    if ((flags & O_TMPFILE) == O_TMPFILE) return -EOPNOTSUPP;
    return SystemCalls::Open(path, flags);
  }
  int Allocate(int, int64_t) override { return EOPNOTSUPP; }
  int BypassCache(int) override { return EINVAL; }
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(QueueKind kind,
                                                     int descriptor,
                                                     int depth) override {
    if (kind == QueueKind::kIoUring) {
      return absl::UnavailableError("io_uring refused: for a test");
    }
    return SystemCalls::MakeQueue(kind, descriptor, depth);
  }
};

TEST(FileStoreTest, DoesWithoutWhatASystemDoesNotHaveAndSaysSo) {
  PlainSystem plain;
  const std::string directory = absl::StrCat(::testing::TempDir(), "/plain");
  std::filesystem::create_directory(directory);
  FileStoreOptions options = Options();
  options.directory = directory;
  options.system = &plain;
  ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Make(options));
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  EXPECT_THAT(store->Describe(),
              AllOf(HasSubstr("8 threads (io_uring refused: for a test)"),
                    HasSubstr("through the page cache: the file system refuses "
                              "O_DIRECT"),
                    HasSubstr("space not reserved")));
  ASSERT_OK(store->Create("region", 100003));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 100003)));
  EXPECT_EQ(*ReadNow(*store, "region", 0, 100003), Pattern(1, 100003));

  options.queue = Queue::kIoUring;
  EXPECT_THAT(FileStore::Make(options),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("refused")));
}

class FullSystem : public SystemCalls {
 public:
  int Allocate(int, int64_t) override { return ENOSPC; }
};

TEST(FileStoreTest, BelievesTheSystemThatThereIsNoRoom) {
  FullSystem full;
  FileStoreOptions options = Options();
  options.system = &full;
  for (const bool keep : {false, true}) {
    options.keep = keep;
    options.name = "does_not_fit";
    EXPECT_THAT(FileStore::Make(options),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("it needs"), HasSubstr("available"))));
  }
  EXPECT_FALSE(std::filesystem::exists(options.directory + "/does_not_fit"));
  EXPECT_FALSE(
      std::filesystem::exists(options.directory + "/does_not_fit.new"));
}

TEST(FileStoreTest, WithoutThreadsThereIsNone) {
  for (const Queue queue : {Queue::kThreads, Queue::kIoUring}) {
    FileStoreOptions options = Options();
    options.queue = queue;
    options.name = "no_threads";
    {
      const ::fsdp::testing::NoThreads none;
      EXPECT_THAT(FileStore::Make(options),
                  StatusIs(absl::StatusCode::kResourceExhausted,
                           HasSubstr("cannot start a thread")));
    }
    EXPECT_OK(FileStore::Make(options));
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
