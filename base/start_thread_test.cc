#include "base/start_thread.h"

#include <memory>

#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"

namespace fsdp {
namespace {

using ::fsdp::testing::NoThreads;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StartThreadTest, RunsTheBodyOnAThreadOfItsOwn) {
  std::thread::id ran_on;
  ASSERT_OK_AND_ASSIGN(std::thread thread, StartThread("to test", [&] {
                         ran_on = std::this_thread::get_id();
                       }));
  const std::thread::id id = thread.get_id();
  thread.join();
  EXPECT_EQ(ran_on, id);
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST(StartThreadTest, NamesPurposeAndLimitsWhereThereIsNone) {
  const auto held = std::make_shared<bool>(false);
  {
    const NoThreads none;
    EXPECT_THAT(
        StartThread("to write shards", [held] { *held = true; }).status(),
        StatusIs(absl::StatusCode::kResourceExhausted,
                 AllOf(HasSubstr("a thread to write shards: "),
                       HasSubstr("ulimit -u"))));
  }
  EXPECT_FALSE(*held);
  EXPECT_EQ(held.use_count(), 1);
  ASSERT_OK_AND_ASSIGN(std::thread thread, StartThread("to test", [] {}));
  thread.join();
}

TEST(StartThreadTest, ThreadsOfLibrariesAreReportedAlike) {
  const NoThreads none;
  EXPECT_THAT(
      TorchToStatus("open a device", [] { std::thread([] {}).join(); }),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("open a device: "), HasSubstr("ulimit -u"))));
}

}  // namespace
}  // namespace fsdp
