// Tests a job's store over real sockets: as c10d's groups use it, beside c10d's
// own store, and among strangers and those that say nothing.
#include "comm/meeting/job_store.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/meeting/store_server.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::ResourceLimit;
using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

WaitLimits Soon() { return {absl::Now() + absl::Seconds(20)}; }

// Returns so many bytes, or those that come before the other end hangs up.
std::string Receive(int fd, size_t count) {
  timeval limit = {20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  std::string bytes(count, '\0');
  errno = 0;
  bytes.resize(
      std::max<ssize_t>(recv(fd, bytes.data(), count, MSG_WAITALL), 0));
  return bytes;
}

// Waits until the other end hangs up; returns whether it does.
bool IsHungUpOn(int fd) {
  while (!Receive(fd, 1).empty()) {
  }
  return errno == 0 || errno == ECONNRESET;
}

class JobStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }

  void Start(const StoreServerOptions& options) {
    ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
    place_ = {"127.0.0.1", listener.port, "secret"};
    ASSERT_OK_AND_ASSIGN(server_, StoreServer::Start(std::move(listener.fd),
                                                     place_.secret, options));
    ASSERT_OK_AND_ASSIGN(store_, Connect());
  }

  absl::StatusOr<c10::intrusive_ptr<JobStore>> Connect() const {
    return JobStore::Connect(place_, absl::Seconds(20), Soon());
  }

  // Connects a blocking socket and says nothing.
  UniqueFd Stranger() const {
    auto connection = ConnectTo("127.0.0.1", place_.port, Soon());
    EXPECT_OK(connection);
    UniqueFd fd = std::move(connection->fd);
    const int flags = fcntl(fd.get(), F_GETFL);
    fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK);
    return fd;
  }

  // A new caller is answered.
  void ExpectAnswers() const {
    ASSERT_OK_AND_ASSIGN(const auto store, Connect());
    store->set("a", "value");
    EXPECT_EQ(store->get_to_str("a"), "value");
  }

  JobStorePlace place_;
  std::unique_ptr<StoreServer> server_;
  c10::intrusive_ptr<JobStore> store_;
};

// Makes one of the calls that do not wait and returns what it says.
std::string Act(c10d::Store& store, int call, const std::string& key,
                const std::string& value, const std::string& other) {
  switch (call) {
    case 0:
      store.set(key, value);
      return "";
    case 1:
      return store.compareSet(key, other, value);
    case 2:
      return absl::StrCat(store.deleteKey(key));
    case 3:
      return absl::StrCat(store.check({key, value}));
    case 4:
      return absl::StrCat(store.getNumKeys());
    case 5:
      return store.check({key}) ? store.get_to_str(key) : "";
    default:
      return absl::StrCat(store.add("number" + key, call - 9));
  }
}

TEST_F(JobStoreTest, DoesAsC10dsStoreDoes) {
  c10d::HashStore oracle;
  std::mt19937 random(1);
  const std::vector<std::string> texts = {"", "a", "b", std::string("c\0d", 3)};
  const auto text = [&] { return texts[random() % texts.size()]; };
  for (int i = 0; i < 3000; ++i) {
    const int call = static_cast<int>(random() % 14);
    const std::string key = text();
    const std::string value = text();
    const std::string other = text();
    ASSERT_EQ(Act(*store_, call, key, value, other),
              Act(oracle, call, key, value, other))
        << i << ": call " << call;
  }
}

TEST_F(JobStoreTest, GetWaitsForTheKey) {
  std::thread set([this] { store_->clone()->set("a", "value"); });
  EXPECT_EQ(store_->get_to_str("a"), "value");
  set.join();
}

// A caller that waits keeps nobody from calling the same store.
TEST_F(JobStoreTest, OneThatWaitsIsInNobodysWay) {
  std::thread wait([this] { store_->wait({"a", "b"}); });
  store_->set("a", "");
  EXPECT_FALSE(store_->check({"b"}));
  store_->set("b", "");
  wait.join();
}

TEST_F(JobStoreTest, WaitsEnd) {
  EXPECT_THAT(
      TorchToStatus("wait",
                    [this] {
                      store_->wait({"a", "b"}, std::chrono::milliseconds(20));
                    })
          .message(),
      HasSubstr("after 20 ms: a, b"));
  store_->setTimeout(std::chrono::milliseconds(30));
  EXPECT_THAT(TorchToStatus("get", [this] { store_->get("a"); }).message(),
              HasSubstr("after 30 ms: a"));
}

// A call that does not wait in the store is given up before one that does,
// whose answer may come as much later.
TEST(StoppedStoreTest, WhatWaitsForNothingIsGivenUpFirst) {
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  const int port = listener.port;
  const pid_t server = fork();
  ASSERT_GE(server, 0);
  if (server == 0) {
    const auto serving = StoreServer::Start(std::move(listener.fd), "");
    for (;;) pause();
  }
  const auto end = absl::MakeCleanup([server] {
    kill(server, SIGKILL);
    waitpid(server, nullptr, 0);
  });
  ASSERT_OK_AND_ASSIGN(
      const auto store,
      JobStore::Connect({"127.0.0.1", port, ""}, absl::Seconds(2),
                        {absl::Now() + absl::Seconds(60)}));
  store->set("a", "");
  store->clone()->check({"a"});
  ASSERT_EQ(kill(server, SIGSTOP), 0);
  ASSERT_EQ(waitpid(server, nullptr, WUNTRACED), server);
  absl::Notification waited;
  std::thread waits([&] {
    TorchToStatus("wait", [&] {
      store->wait({"b"}, std::chrono::milliseconds(100));
    }).IgnoreError();
    waited.Notify();
  });
  // With two calls it does not matter who begins.
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(TorchToStatus("set", [&] { store->set("a", "b"); }),
                StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  }
  EXPECT_FALSE(waited.HasBeenNotified());
  waits.join();
}

TEST_F(JobStoreTest, ErrorsAreExceptions) {
  store_->set("a", "text");
  EXPECT_THAT(TorchToStatus("add", [this] { store_->add("a", 1); }).message(),
              HasSubstr("no number"));
  // The error has no consequence for what comes after.
  EXPECT_EQ(store_->get_to_str("a"), "text");
  server_.reset();
  EXPECT_THAT(TorchToStatus("check", [this] { store_->check({"a"}); }),
              StatusIs(absl::StatusCode::kUnavailable, _));
}

TEST_F(JobStoreTest, WhoeverSaysNothingIsHungUpOn) {
  StoreServerOptions options;
  options.claim_timeout = absl::Milliseconds(50);
  Start(options);
  const UniqueFd silent = Stranger();
  const UniqueFd slow = Stranger();
  ASSERT_EQ(send(slow.get(), kStoreMagic.data(), 3, MSG_NOSIGNAL), 3);
  EXPECT_TRUE(IsHungUpOn(silent.get()));
  EXPECT_TRUE(IsHungUpOn(slow.get()));
  ExpectAnswers();
}

// A thousand callers that say nothing keep no rank out.
TEST_F(JobStoreTest, ManyStrangers) {
  StoreServerOptions options;
  options.max_strangers = 64;
  options.claim_timeout = absl::Seconds(1);
  Start(options);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(Stranger());
    if (i >= 200) strangers.erase(strangers.begin());
  }
  ExpectAnswers();
  EXPECT_TRUE(IsHungUpOn(strangers[0].get()));
}

// More ranks than there may be strangers or files come before the server looks.
TEST_F(JobStoreTest, ManyRanksAtOnceAreAllServed) {
  const ResourceLimit files(RLIMIT_NOFILE, 256);
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  place_.port = listener.port;
  std::vector<UniqueFd> ranks;
  ranks.reserve(200);
  for (int i = 0; i < 200; ++i) ranks.push_back(Stranger());
  ASSERT_OK_AND_ASSIGN(
      server_, StoreServer::Start(std::move(listener.fd), place_.secret));
  const std::string nonce(kNonceBytes, 'n');
  for (const UniqueFd& rank : ranks) {
    const std::string greeting = Receive(rank.get(), kGreetingBytes);
    ASSERT_EQ(greeting.size(), kGreetingBytes);
    const std::string claim = absl::StrCat(
        kStoreMagic, nonce,
        CallerProof(place_.secret, greeting.substr(kStoreMagic.size()), nonce));
    send(rank.get(), claim.data(), claim.size(), MSG_NOSIGNAL);
    ASSERT_EQ(Receive(rank.get(), kWelcomeBytes).size(), kWelcomeBytes);
  }
}

// Four messages that make the server answer 40 MB, which nobody reads.
TEST_F(JobStoreTest, ARankThatDoesNotReadIsInNobodysWay) {
  store_->set("large", std::string(10'000'000, 'v'));
  ASSERT_OK_AND_ASSIGN(
      const auto lazy,
      StoreConnection::Open("127.0.0.1", place_.port, place_.secret, Soon()));
  for (int i = 0; i < 4; ++i) {
    // This does not wait for the answer.
    EXPECT_THAT(lazy->Call({static_cast<uint8_t>(StoreAsk::kGet), 0, {"large"}},
                           absl::Now()),
                StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  }
  ExpectAnswers();
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
      StoreConnection::Open("127.0.0.1", listener->port, "secret", Soon())
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
