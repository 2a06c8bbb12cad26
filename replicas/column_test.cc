#include "replicas/column.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <array>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "gtest/gtest.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;

constexpr absl::Duration kLimit = absl::Minutes(1);

class ColumnTest : public ::testing::TestWithParam<comm::Backend> {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(comm::Listener listener, comm::Listen("127.0.0.1", 0));
    comm::Environment place;
    place.master_addr = "127.0.0.1";
    place.master_port = listener.port;
    place.secret = "of the test";
    place.kept_store = true;
    place.kept_store_prefix = "column";
    ASSERT_OK_AND_ASSIGN(keeper_, comm::StoreServer::Start(
                                      std::move(listener.fd), place.secret));
    comm::ConnectOptions options;
    options.backend = GetParam();
    options.timeout = options.connect_timeout = kLimit;
    for (auto& column : columns_) {
      column = std::make_unique<Column>(place, options);
    }
  }

  std::unique_ptr<comm::StoreServer> keeper_;
  std::array<std::unique_ptr<Column>, 2> columns_;
};

absl::Status AddUp(comm::Communicator& ranks) {
  FSDP_ASSIGN_OR_RETURN(
      const auto work,
      ranks.AllReduce(at::ones({3}), comm::ReduceOp::kSum, "ones"));
  return work->Wait(absl::Now() + kLimit);
}

// The other rank has connected and is silent, as if it were stopped.
TEST_P(ColumnTest, WhoWaitsInAGroupReturnsWhereItsEpochEnds) {
  for (const bool in_part : {false, true}) {
    const absl::Time began = absl::Now();
    const int64_t epoch = in_part ? 4 : 2;
    absl::Notification connected;
    absl::Notification over;
    std::thread silent([&] {
      EXPECT_OK(columns_[1]->Connect(epoch, 1, 2));
      const auto part = columns_[1]->ConnectPart(1, 2);
      EXPECT_OK(part.status());
      over.WaitForNotificationWithTimeout(kLimit);
    });
    std::thread waits([&] {
      EXPECT_OK(columns_[0]->Connect(epoch, 0, 2));
      const auto part = columns_[0]->ConnectPart(0, 2);
      EXPECT_OK(part.status());
      connected.Notify();
      EXPECT_THAT(AddUp(in_part ? **part : columns_[0]->ranks()),
                  StatusIs(absl::StatusCode::kAborted, _));
    });
    connected.WaitForNotificationWithTimeout(kLimit);
    columns_[0]->EndBefore(epoch, absl::AbortedError("it goes on"));
    columns_[0]->EndBefore(epoch + 1, absl::AbortedError("it is over"));
    waits.join();
    over.Notify();
    silent.join();
    EXPECT_LT(absl::Now() - began, kLimit / 2);
  }
}

TEST_P(ColumnTest, WhoWaitsForAGroupReturnsWhereItsEpochEnds) {
  const absl::Time began = absl::Now();
  std::thread waits([&] {
    EXPECT_THAT(columns_[0]->Connect(1, 0, 2),
                StatusIs(absl::StatusCode::kCancelled, _));
  });
  columns_[0]->EndBefore(2, absl::AbortedError("it is over"));
  waits.join();
  EXPECT_LT(absl::Now() - began, kLimit / 2);
}

// Others may have gone on already.
TEST_P(ColumnTest, AnEpochThatIsCurrentGoesOn) {
  std::array<std::thread, 2> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    columns_[rank]->EndBefore(3, absl::AbortedError("it is over"));
    ranks[rank] = std::thread([this, rank] {
      EXPECT_OK(columns_[rank]->Connect(3, rank, 2));
      columns_[rank]->EndBefore(3, absl::AbortedError("it is over"));
      EXPECT_OK(AddUp(columns_[rank]->ranks()));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

INSTANTIATE_TEST_SUITE_P(Backends, ColumnTest,
                         ::testing::Values(comm::Backend::kAuto,
                                           comm::Backend::kGloo));

}  // namespace
}  // namespace fsdp::replicas
