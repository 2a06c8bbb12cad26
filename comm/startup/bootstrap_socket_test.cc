#include "comm/startup/bootstrap_socket.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

TEST(ListenTest, TakesAFreePortThatAnswersAtOnce) {
  for (const char* address : {"127.0.0.1", "localhost", "some-other-host"}) {
    ASSERT_OK_AND_ASSIGN(const Listener listener, Listen(address, 0));
    EXPECT_GT(listener.port, 0);
    EXPECT_NE(fcntl(listener.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
    const char* here = IsLoopback(address) ? address : "127.0.0.1";
    ASSERT_OK_AND_ASSIGN(const Connection connection,
                         ConnectTo(here, listener.port, {Soon()}));
    const Route& route = connection.route;
    EXPECT_TRUE(IsLoopback(route.local)) << route.local;
    EXPECT_TRUE(IsLoopback(route.remote)) << route.remote;
  }
}

TEST(ListenTest, APortInUseIsNamed) {
  ASSERT_OK_AND_ASSIGN(const Listener first, Listen("127.0.0.1", 0));
  for (const char* address : {"127.0.0.1", "some-other-host"}) {
    EXPECT_THAT(Listen(address, first.port),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr(absl::StrCat("port ", first.port,
                                                      " is already in use")),
                               HasSubstr("choose another MASTER_PORT"))));
  }
}

TEST(AdoptListenerTest, TakesOnlyWhatListensOnThePort) {
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  const int port = listener.port;
  const int fd = listener.fd.get();
  for (const auto& [wrong_fd, wrong_port] :
       {std::pair<int, int>(fd, port + 1), {fd + 100, port}, {0, port}}) {
    EXPECT_THAT(AdoptListener(wrong_fd, wrong_port),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("does not listen")));
  }
  ASSERT_OK_AND_ASSIGN(const Listener adopted,
                       AdoptListener(listener.fd.Release(), port));
  EXPECT_OK(ConnectTo("127.0.0.1", port, {Soon()}));
}

TEST(ConnectToTest, SaysWhatItMetWith) {
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  const int port = listener.port;
  listener.fd.Reset();
  const absl::Time deadline = absl::Now() + absl::Milliseconds(100);
  EXPECT_THAT(ConnectTo("127.0.0.1", port, {deadline}),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr(absl::StrCat("127.0.0.1:", port)),
                             HasSubstr("Connection refused"))));
  EXPECT_THAT(ConnectTo("no.such.host.invalid", 1, {absl::Now()}),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("cannot be resolved")));
}

// Signals make no connection of what nobody answers, and whoever is asked to
// stop does not wait for it until the deadline.
TEST(ConnectToTest, ASilentAddressIsNotWaitedForLong) {
  ASSERT_OK_AND_ASSIGN(const Listener full, Listen("127.0.0.1", 0));
  ASSERT_EQ(listen(full.fd.get(), 0), 0);
  ASSERT_OK_AND_ASSIGN(const Connection only,
                       ConnectTo("127.0.0.1", full.port, {Soon()}));
  signal(SIGALRM, [](int) {});
  const itimerval often = {{0, 10'000}, {0, 10'000}};
  setitimer(ITIMER_REAL, &often, nullptr);
  const absl::Time begin = absl::Now();
  EXPECT_THAT(
      ConnectTo("127.0.0.1", full.port, {begin + absl::Milliseconds(200)}),
      StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no answer")));
  EXPECT_THAT(ConnectTo("127.0.0.1", full.port,
                        {begin + absl::Minutes(1), [] { return true; }}),
              StatusIs(absl::StatusCode::kCancelled,
                       HasSubstr("while nobody answered")));
  EXPECT_LT(absl::Now(), begin + absl::Seconds(30));
  signal(SIGALRM, SIG_IGN);
}

}  // namespace
}  // namespace fsdp::comm
