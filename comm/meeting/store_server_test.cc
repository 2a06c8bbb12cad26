// Serves ranks, strangers, and those that say nothing over real sockets.
#include "comm/meeting/store_server.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/job_store.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/bootstrap_socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kSecret[] = "of the job";

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

StoreMessage Ask(StoreAsk ask, std::vector<std::string> texts,
                 int64_t number = 0) {
  return {static_cast<uint8_t>(ask), number, std::move(texts)};
}

// Waits until the other end hangs up; returns whether it does.
bool IsHungUpOn(int fd) {
  timeval limit = {20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  char bytes[256];
  for (;;) {
    const ssize_t count = recv(fd, bytes, sizeof(bytes), 0);
    if (count <= 0) return count == 0 || errno == ECONNRESET;
  }
}

class StoreServerTest : public ::testing::Test {
 protected:
  void Start(const StoreServerOptions& options = {}) {
    ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
    port_ = listener.port;
    ASSERT_OK_AND_ASSIGN(
        server_, StoreServer::Start(std::move(listener.fd), kSecret, options));
  }

  absl::StatusOr<std::unique_ptr<StoreConnection>> Connect() const {
    return StoreConnection::Open("127.0.0.1", port_, kSecret, {Soon()});
  }

  // Connects a blocking socket and says nothing.
  UniqueFd Stranger() const {
    auto connection = ConnectTo("127.0.0.1", port_, {Soon()});
    EXPECT_OK(connection);
    UniqueFd fd = std::move(connection->fd);
    const int flags = fcntl(fd.get(), F_GETFL);
    fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK);
    return fd;
  }

  void ExpectAnswers(const std::string& key) const {
    ASSERT_OK_AND_ASSIGN(const auto rank, Connect());
    EXPECT_OK(rank->Call(Ask(StoreAsk::kSet, {key, "value"}), Soon()));
    ASSERT_OK_AND_ASSIGN(const StoreMessage answer,
                         rank->Call(Ask(StoreAsk::kGet, {key}), Soon()));
    EXPECT_EQ(answer.texts, std::vector<std::string>{"value"});
  }

  int port_ = 0;
  std::unique_ptr<StoreServer> server_;
};

TEST_F(StoreServerTest, WhoeverSaysNothingIsHungUpOn) {
  StoreServerOptions options;
  options.claim_timeout = absl::Milliseconds(50);
  Start(options);
  const UniqueFd silent = Stranger();
  const UniqueFd slow = Stranger();
  ASSERT_EQ(send(slow.get(), kStoreMagic.data(), 3, MSG_NOSIGNAL), 3);
  EXPECT_TRUE(IsHungUpOn(silent.get()));
  EXPECT_TRUE(IsHungUpOn(slow.get()));
  ExpectAnswers("a");
}

// A thousand callers that say nothing keep no rank out.
TEST_F(StoreServerTest, ManyStrangers) {
  StoreServerOptions options;
  options.max_strangers = 8;
  Start(options);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(Stranger());
    if (i >= 500 && i % 2 == 0) strangers.erase(strangers.begin());
  }
  ExpectAnswers("a");
  EXPECT_TRUE(IsHungUpOn(strangers[0].get()));
}

// Three messages that make the server answer 40 MB, which nobody reads.
TEST_F(StoreServerTest, ARankThatDoesNotReadIsInNobodysWay) {
  Start();
  std::string value;
  value.resize(10'000'000, 'v');
  ASSERT_OK_AND_ASSIGN(const auto rank, Connect());
  ASSERT_OK(rank->Call(Ask(StoreAsk::kSet, {"large", value}), Soon()));
  ASSERT_OK_AND_ASSIGN(const auto lazy, Connect());
  for (int i = 0; i < 4; ++i) {
    // This does not wait for the answer.
    EXPECT_THAT(lazy->Call(Ask(StoreAsk::kGet, {"large"}), absl::Now()),
                StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  }
  ExpectAnswers("a");
}

// Says `text` to the first who connects.
absl::Status OpenWhatSays(const std::string& text) {
  auto listener = Listen("127.0.0.1", 0);
  if (!listener.ok()) return listener.status();
  std::thread serve([&listener, &text] {
    const UniqueFd fd(accept(listener->fd.get(), nullptr, nullptr));
    send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
    IsHungUpOn(fd.get());
  });
  absl::Status status =
      StoreConnection::Open("127.0.0.1", listener->port, kSecret, {Soon()})
          .status();
  serve.join();
  return status;
}

TEST(NoStoreTest, SpeaksAnotherProtocolOrDoesNotKnowTheSecret) {
  EXPECT_THAT(OpenWhatSays(std::string(kGreetingBytes, 'x')),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("is no store of a job")));
  EXPECT_THAT(
      OpenWhatSays(absl::StrCat(kStoreMagic, std::string(kNonceBytes, 'n'),
                                std::string(kWelcomeBytes, 'p'))),
      StatusIs(absl::StatusCode::kPermissionDenied,
               HasSubstr("does not know the secret of this job")));
}

}  // namespace
}  // namespace fsdp::comm
