#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/gloo/message_group.h"
#include "comm/gloo/message_transport.h"
#include "comm/gloo/peer_collectives.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The messages of two ranks to each other, by sender and tag.
using Mail = std::map<std::pair<int, int>, std::deque<std::string>>;

// A transport for one thread, which waits only for what has been sent before.
class MailTransport final : public MessageTransport {
 public:
  MailTransport(int rank, Mail* mail, const bool* peer_is_gone)
      : rank_(rank), mail_(mail), peer_is_gone_(peer_is_gone) {}

  absl::StatusOr<std::shared_ptr<Message>> Send(int, int tag, const void* data,
                                                int64_t bytes) override {
    (*mail_)[{rank_, tag}].emplace_back(static_cast<const char*>(data), bytes);
    return std::make_shared<Letter>(nullptr, nullptr, 0);
  }
  absl::StatusOr<std::shared_ptr<Message>> Receive(int peer, int tag,
                                                   void* data,
                                                   int64_t bytes) override {
    if (*peer_is_gone_) return absl::UnavailableError("no connection");
    return std::make_shared<Letter>(&(*mail_)[{peer, tag}], data, bytes);
  }
  void Close() override { *closed_ = true; }

  std::shared_ptr<const bool> closed() const { return closed_; }

 private:
  class Letter final : public Message {
   public:
    Letter(std::deque<std::string>* box, void* data, int64_t bytes)
        : box_(box), data_(data), bytes_(bytes) {}

    absl::Status Wait() override {
      if (box_ == nullptr) return absl::OkStatus();
      if (is_aborted_) return absl::CancelledError("aborted");
      if (box_->empty()) return absl::UnavailableError("it never came");
      std::memcpy(data_, box_->front().data(), bytes_);
      box_->pop_front();
      return absl::OkStatus();
    }
    void Abort() override { is_aborted_ = true; }

   private:
    std::deque<std::string>* const box_;  // null: is sent
    void* const data_;
    const int64_t bytes_;
    bool is_aborted_ = false;
  };

  const int rank_;
  Mail* const mail_;
  const bool* const peer_is_gone_;
  const std::shared_ptr<bool> closed_ = std::make_shared<bool>(false);
};

// One of two ranks.
struct Rank {
  Rank(int rank, Mail* mail, const bool* peer_is_gone)
      : Rank(rank, std::make_unique<MailTransport>(rank, mail, peer_is_gone)) {}
  Rank(int rank, std::unique_ptr<MailTransport> transport)
      : closed(transport->closed()),
        messages(std::move(transport)),
        calls(rank, RankNames(2), &messages) {}

  const std::shared_ptr<const bool> closed;
  PeerMessages messages;
  CallExchange calls;
};

Call CallOf(int64_t count) {
  return {Collective::kBroadcast, "weight", "float32", count, ""};
}

class CallExchangeTest : public ::testing::Test {
 protected:
  CallExchangeTest()
      : first_(0, &mail_, &gone_[1]), second_(1, &mail_, &gone_[0]) {
    EXPECT_OK(first_.calls.Start());
    EXPECT_OK(second_.calls.Start());
  }

  Mail mail_;
  bool gone_[2] = {false, false};
  Rank first_;
  Rank second_;
};

TEST_F(CallExchangeTest, CallsThatDifferAreNamed) {
  ASSERT_OK(first_.calls.Announce(0, CallOf(4)));
  ASSERT_OK(second_.calls.Announce(0, CallOf(5)));
  for (Rank* rank : {&first_, &second_}) {
    EXPECT_THAT(rank->calls.Agree(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("the ranks' calls #0 differ"),
                               HasSubstr("rank 0 called broadcast"),
                               HasSubstr("rank 1 called broadcast"))));
  }
}

// A peer's last call may be over before this rank begins to wait for the next.
TEST_F(CallExchangeTest, WhoHasLeftAfterACallFailsTheNextOneOnly) {
  constexpr int kDataTag = 7;
  int32_t received = 0;
  PeerMessages::Batch data(&second_.messages);
  ASSERT_OK(first_.calls.Announce(0, CallOf(4)));
  ASSERT_OK(second_.calls.Announce(0, CallOf(4)));
  ASSERT_OK(second_.messages.Receive(0, kDataTag, &received, sizeof(received),
                                     &data));
  ASSERT_OK(first_.calls.Agree());
  const int32_t sent = 42;
  PeerMessages::Batch sends(&first_.messages);
  ASSERT_OK(first_.messages.Send(1, kDataTag, &sent, sizeof(sent), &sends));
  ASSERT_OK(first_.messages.Await(&sends));
  gone_[0] = true;

  EXPECT_OK(second_.calls.Agree());
  EXPECT_OK(second_.messages.Await(&data));
  EXPECT_EQ(received, 42);
  EXPECT_FALSE(*second_.closed);

  ASSERT_OK(second_.calls.Announce(1, CallOf(4)));
  EXPECT_THAT(second_.calls.Agree(), StatusIs(absl::StatusCode::kUnavailable,
                                              HasSubstr("no connection")));
  EXPECT_TRUE(*second_.closed);
}

}  // namespace
}  // namespace fsdp::comm
