// Tests a JobStore as c10d's groups use it, beside c10d's own store.
#include "comm/meeting/job_store.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

WaitLimits Soon() { return {absl::Now() + absl::Seconds(20)}; }

class JobStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
    place_ = {"127.0.0.1", listener.port, "secret"};
    ASSERT_OK_AND_ASSIGN(
        server_, StoreServer::Start(std::move(listener.fd), place_.secret));
    ASSERT_OK_AND_ASSIGN(store_,
                         JobStore::Connect(place_, absl::Seconds(20), Soon()));
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

}  // namespace
}  // namespace fsdp::comm
