// Goes from LaunchRanks() to a collective: processes that find each other.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/launcher_stop_request.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_of_one_host.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::SumRanks;

constexpr char kRole[] = "BOOTSTRAP_TEST_ROLE";
constexpr absl::Duration kLimit = absl::Seconds(30);

absl::StatusOr<std::unique_ptr<Communicator>> ConnectRank() {
  FSDP_ASSIGN_OR_RETURN(const Environment environment,
                        ReadEnvironment(std::getenv));
  ConnectOptions options;
  options.connect_timeout = options.timeout = kLimit;
  return Connect(environment, options);
}

absl::Status RunRank(const std::string& role) {
  FSDP_ASSIGN_OR_RETURN(const auto communicator, ConnectRank());
  FSDP_RETURN_IF_ERROR(SumRanks(*communicator));
  if (role == "sum") return absl::OkStatus();
  if (communicator->rank() == 1) raise(SIGKILL);
  return SumRanks(*communicator);
}

LaunchReport Launch(const std::string& role, int ranks) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {"bootstrap_launcher_test"};
  options.environment = {{kRole, role}};
  options.grace_period = kLimit;
  absl::StatusOr<LaunchReport> report = LaunchRanks(options);
  EXPECT_OK(report);
  return report.ok() ? *std::move(report) : LaunchReport();
}

TEST(BootstrapLauncherTest, LaunchedRanksMeet) {
  for (const int ranks : {1, 3}) {
    const LaunchReport report = Launch("sum", ranks);
    EXPECT_EQ(report.exit_code(), 0) << report.ToString();
    EXPECT_EQ(report.ranks.size(), ranks);
  }
}

TEST(BootstrapLauncherTest, SurvivorsOfAKilledRankEndByThemselves) {
  const LaunchReport report = Launch("kill_rank_1", 3);
  EXPECT_EQ(report.exit_code(), 128 + SIGKILL);
  EXPECT_EQ(report.ToString(),
            "rank 1 was killed by signal 9 (SIGKILL); then ranks 0, 2 exited "
            "with code 1");
}

// Rank 1 never connects. Rank 0, which waits for it, tells the launcher to end.
int StopWhileConnecting() {
  const Environment environment = ReadEnvironment(std::getenv).value();
  if (environment.rank == 1) pause();
  const StopRequest stop;
  bool told = false;
  ConnectOptions options;
  options.connect_timeout = absl::Hours(1);
  options.stop_requested = [&stop, &told] {
    if (!std::exchange(told, true)) kill(getppid(), SIGTERM);
    return stop.requested();
  };
  const absl::Status status = Connect(environment, options).status();
  return absl::IsCancelled(status) ? 128 + stop.signal() : 1;
}

TEST(BootstrapLauncherTest, ARankThatConnectsHeedsTheFirstSignal) {
  const LaunchReport report = Launch("stop", 2);
  EXPECT_EQ(report.interrupt_signal, SIGTERM);
  ASSERT_EQ(report.ranks.size(), 2);
  EXPECT_EQ(report.ranks[0].end.exit_code, 128 + SIGTERM) << report.ToString();
}

}  // namespace

// Plays the process's role, if it has one; the test itself has none.
std::optional<int> RunRole() {
  const char* role = std::getenv(kRole);
  if (role == nullptr) return std::nullopt;
  if (role == absl::string_view("stop")) return StopWhileConnecting();
  const absl::Status status = RunRank(role);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace fsdp::comm

int main(int argc, char** argv) {
  if (const auto code = fsdp::comm::RunRole(); code.has_value()) return *code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
