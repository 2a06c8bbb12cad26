// Tests the order of messages over a network in memory that a test can hold up.
// communicator_contract tests numbers with real backends.
#include "comm/gloo/peer_collectives.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr auto kFloat = at::ScalarType::Float;
constexpr absl::Duration kLimit = absl::Seconds(30);

// The floats of a message that fills a chunk if ranks are few.
constexpr int64_t kChunk = (1 << 20) / sizeof(float);

// The mail of all ranks. A message is read when the receiver takes it, or when
// the sender waits for it.
class Mail {
 public:
  struct Letter {
    const void* data;
    int64_t bytes;
    bool is_held;
    std::string copy = {};
    bool is_gone = false;  // its memory is the sender's again
  };

  // Message number `index` from one rank to another arrives only when that one
  // has sent `sent` messages back.
  void Hold(int from, int to, int index, int sent) {
    absl::MutexLock lock(&mutex_);
    held_ = {from, to, index, sent};
  }

  std::shared_ptr<Letter> Send(int from, int to, int tag, const void* data,
                               int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    const bool is_held = held_.from == from && held_.to == to &&
                         held_.index == sent_[{from, to}];
    ++sent_[{from, to}];
    auto letter = std::make_shared<Letter>(Letter{data, bytes, is_held});
    boxes_[{from, to, tag}].push_back(letter);
    return letter;
  }

  void LetGo(Letter& letter) {
    absl::MutexLock lock(&mutex_);
    if (letter.is_gone) return;
    letter.copy.assign(static_cast<const char*>(letter.data), letter.bytes);
    letter.is_gone = true;
  }

  absl::Status Take(int from, int to, int tag, int index, void* data,
                    int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    const auto has_come = [&] {
      mutex_.AssertHeld();
      const auto& box = boxes_[{from, to, tag}];
      if (closed_ || static_cast<int>(box.size()) <= index) return closed_;
      return !box[index]->is_held || sent_[{to, from}] >= held_.sent;
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&has_come), kLimit)) {
      return absl::UnavailableError("it never came");
    }
    if (closed_) return absl::UnavailableError("closed");
    Letter& letter = *boxes_[{from, to, tag}][index];
    FSDP_RETURN_IF_ERROR(
        ::fsdp::testing::CheckThat(letter.bytes, bytes, "bytes of a message"));
    std::memcpy(data, letter.is_gone ? letter.copy.data() : letter.data, bytes);
    letter.is_gone = true;
    return absl::OkStatus();
  }

  void Close() {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }

  bool IsClosed() {
    absl::MutexLock lock(&mutex_);
    return closed_;
  }

  int NumSent() {
    absl::MutexLock lock(&mutex_);
    int count = 0;
    for (const auto& [ranks, sent] : sent_) count += sent;
    return count;
  }

 private:
  struct Held {
    int from = -1;
    int to = -1;
    int index = 0;
    int sent = 0;
  };

  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  Held held_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, int> sent_ ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Letter>>>
      boxes_ ABSL_GUARDED_BY(mutex_);
};

class SentMessage final : public Message {
 public:
  SentMessage(Mail* mail, std::shared_ptr<Mail::Letter> letter)
      : mail_(mail), letter_(std::move(letter)) {}
  absl::Status Wait() override {
    mail_->LetGo(*letter_);
    return absl::OkStatus();
  }
  void Abort() override {}

 private:
  Mail* const mail_;
  const std::shared_ptr<Mail::Letter> letter_;
};

class ReceivedMessage final : public Message {
 public:
  explicit ReceivedMessage(std::function<absl::Status()> take)
      : take_(std::move(take)) {}
  absl::Status Wait() override { return take_(); }
  void Abort() override {}

 private:
  const std::function<absl::Status()> take_;
};

class MailTransport final : public MessageTransport {
 public:
  // While `*peer_is_gone`, nothing can be received.
  MailTransport(Mail* mail, int rank, const bool* peer_is_gone = nullptr)
      : mail_(mail), rank_(rank), peer_is_gone_(peer_is_gone) {}

  absl::StatusOr<std::shared_ptr<Message>> Send(int peer, int tag,
                                                const void* data,
                                                int64_t bytes) override {
    return std::make_shared<SentMessage>(
        mail_, mail_->Send(rank_, peer, tag, data, bytes));
  }
  absl::StatusOr<std::shared_ptr<Message>> Receive(int peer, int tag,
                                                   void* data,
                                                   int64_t bytes) override {
    if (peer_is_gone_ != nullptr && *peer_is_gone_) {
      return absl::UnavailableError("no connection");
    }
    const int index = received_[{peer, tag}]++;
    return std::make_shared<ReceivedMessage>(
        [=] { return mail_->Take(peer, rank_, tag, index, data, bytes); });
  }
  void Close() override { mail_->Close(); }

 private:
  Mail* const mail_;
  const int rank_;
  const bool* const peer_is_gone_;
  std::map<std::pair<int, int>, int> received_;
};

absl::Status Agreed() { return absl::OkStatus(); }

// Runs `call` on all ranks of a group that `mail` connects.
std::vector<absl::Status> OnAllRanks(
    Mail& mail, int world_size,
    const std::function<absl::Status(PeerCollectives&, int rank)>& call) {
  std::vector<absl::Status> results(world_size);
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      PeerMessages messages(std::make_unique<MailTransport>(&mail, rank));
      PeerCollectives collectives(rank, world_size, &messages);
      results[rank] = call(collectives, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// Returns whole numbers that differ between ranks.
float ValueOf(int rank, int64_t i) {
  return static_cast<float>((i * (2 * rank + 3) + rank) % 1009);
}

std::vector<float> ValuesOf(int rank, int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = ValueOf(rank, i);
  return values;
}

absl::Status AllReduceOnce(PeerCollectives& peers, int rank, int64_t count) {
  std::vector<float> data = ValuesOf(rank, count);
  absl::Status status = peers.AllReduce(reinterpret_cast<char*>(data.data()),
                                        kFloat, count, ReduceOp::kSum, Agreed);
  for (int64_t i = 0; status.ok() && i < count; ++i) {
    float sum = 0;
    for (int other = 0; other < peers.world_size(); ++other) {
      sum += ValueOf(other, i);
    }
    if (data[i] == sum) continue;
    status = absl::InternalError(
        absl::StrCat("element ", i, " is ", data[i], " instead of ", sum));
  }
  return status;
}

// Each rank's part has two chunks, so each gives two messages to the other. The
// second one of rank 1 waits for a third one of rank 0: a result.
TEST(PeerCollectivesTest, AnAllReduceHandsOnWhatIsSummedBeforeItHasTheRest) {
  Mail mail;
  mail.Hold(/*from=*/1, /*to=*/0, /*index=*/1, /*sent=*/3);
  EXPECT_THAT(OnAllRanks(mail, 2,
                         [](PeerCollectives& peers, int rank) {
                           return AllReduceOnce(peers, rank, 4 * kChunk);
                         }),
              Each(absl::OkStatus()));
}

TEST(PeerCollectivesTest, NothingIsSentBeforeTheRanksAgree) {
  constexpr int64_t kCount = 6;
  using Call = std::function<absl::Status(PeerCollectives&, char*, char*,
                                          const PeerCollectives::Agree&)>;
  const std::map<std::string, Call> calls = {
      {"all-gather",
       [](PeerCollectives& peers, char* out, char* in, const auto& agree) {
         return peers.Exchange(out, in, 0, sizeof(float), agree);
       }},
      {"all-to-all",
       [](PeerCollectives& peers, char* out, char* in, const auto& agree) {
         return peers.Exchange(out, in, sizeof(float), sizeof(float), agree);
       }},
      {"reduce-scatter",
       [](PeerCollectives& peers, char* out, char* in, const auto& agree) {
         return peers.ReduceScatter(out, in, kFloat, 1, ReduceOp::kSum, agree);
       }},
      {"all-reduce",
       [](PeerCollectives& peers, char* out, char*, const auto& agree) {
         return peers.AllReduce(out, kFloat, kCount, ReduceOp::kSum, agree);
       }},
      {"broadcast",
       [](PeerCollectives& peers, char* out, char*, const auto& agree) {
         return peers.Broadcast(out, kCount * sizeof(float), 0, agree);
       }},
  };
  for (const auto& [name, call] : calls) {
    Mail mail;
    const auto results =
        OnAllRanks(mail, 3, [&call = call](PeerCollectives& peers, int rank) {
          std::vector<float> in = ValuesOf(rank, kCount);
          std::vector<float> out = ValuesOf(rank, kCount);
          return call(peers, reinterpret_cast<char*>(out.data()),
                      reinterpret_cast<char*>(in.data()),
                      [] { return absl::InternalError("they differ"); });
        });
    EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kInternal,
                                       HasSubstr("they differ"))))
        << name;
    EXPECT_EQ(mail.NumSent(), 0) << name;
  }
}

// One of two ranks, which are in one thread.
struct Rank {
  Rank(int rank, Mail* mail, const bool* peer_is_gone)
      : messages(std::make_unique<MailTransport>(mail, rank, peer_is_gone)),
        calls(rank, RankNames(2), &messages) {}

  PeerMessages messages;
  CallExchange calls;
};

Call Broadcast(int64_t count) {
  return {Collective::kBroadcast, "weight", "float32", count, ""};
}

// A peer's last call may be over before this rank begins to wait for the next.
TEST(CallExchangeTest, WhoHasLeftAfterACallFailsTheNextOneOnly) {
  constexpr int kDataTag = 7;
  Mail mail;
  bool gone[2] = {false, false};
  Rank first(0, &mail, &gone[1]);
  Rank second(1, &mail, &gone[0]);
  ASSERT_OK(first.calls.Start());
  ASSERT_OK(second.calls.Start());
  int32_t received = 0;
  PeerMessages::Batch data(&second.messages);
  ASSERT_OK(first.calls.Announce(0, Broadcast(4)));
  ASSERT_OK(second.calls.Announce(0, Broadcast(4)));
  ASSERT_OK(
      second.messages.Receive(0, kDataTag, &received, sizeof(received), &data));
  ASSERT_OK(first.calls.Agree());
  const int32_t sent = 42;
  PeerMessages::Batch sends(&first.messages);
  ASSERT_OK(first.messages.Send(1, kDataTag, &sent, sizeof(sent), &sends));
  ASSERT_OK(first.messages.Await(&sends));
  gone[0] = true;

  EXPECT_OK(second.calls.Agree());
  EXPECT_OK(second.messages.Await(&data));
  EXPECT_EQ(received, 42);
  EXPECT_FALSE(mail.IsClosed());

  ASSERT_OK(second.calls.Announce(1, Broadcast(4)));
  EXPECT_THAT(second.calls.Agree(), StatusIs(absl::StatusCode::kUnavailable,
                                             HasSubstr("no connection")));
  EXPECT_TRUE(mail.IsClosed());
}

// A backend that notes how long a message is waited for.
struct Patience final : c10d::Backend {
  struct Message final : c10d::Work {
    explicit Message(Patience* owner_in) : owner(owner_in) {}
    bool wait(std::chrono::milliseconds limit) override {
      owner->limit = limit;
      return true;
    }
    Patience* owner;
  };
  Patience() : Backend(0, 2) {}
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int,
                                      int) override {
    return c10::make_intrusive<Message>(this);
  }
  std::chrono::milliseconds limit{0};
};

TEST(C10dTransportTest, AJobMayLastForYears) {
  const auto backend = c10::make_intrusive<Patience>();
  const auto transport = C10dTransport(backend, RankNames(2), [] {});
  const char byte = 0;
  ASSERT_OK_AND_ASSIGN(const auto sent, transport->Send(1, 0, &byte, 1));
  EXPECT_OK(sent->Wait());
  EXPECT_GE(backend->limit, std::chrono::hours(24 * 365 * 5));
}

}  // namespace
}  // namespace fsdp::comm
