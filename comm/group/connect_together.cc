#include "comm/group/connect_together.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

constexpr char kFailureKey[] = "failure";
constexpr char kCountKey[] = "num_through";
constexpr char kAllKey[] = "all_through";
// Stands in front of an error in the place of a value. No host is named so, and
// no process has such a number.
constexpr absl::string_view kFailed("\0failed ", 8);

std::string ThroughKey(int rank) { return absl::StrCat("through/", rank); }

struct Attempt {
  absl::Notification ended;
  absl::Status result;  // once `ended`
};

// The messages that the ranks leave for each other in the store.
class Session {
 public:
  Session(c10::intrusive_ptr<c10d::Store> store, int rank,
          const RankNames& names, const WaitLimits& limits)
      : store_(std::move(store)),
        rank_(rank),
        names_(names),
        limits_(limits),
        begin_(absl::Now()) {}

  absl::Status AwaitOwn(const Attempt& attempt) {
    while (!attempt.ended.WaitForNotificationWithTimeout(Pause())) {
      FSDP_RETURN_IF_ERROR(LookAround());
    }
    return attempt.result.ok() ? absl::OkStatus() : Tell(attempt.result);
  }

  absl::Status AwaitOthers() {
    bool all = false;
    FSDP_RETURN_IF_ERROR(TorchToStatus("the store broke off", [&] {
      store_->set(ThroughKey(rank_), std::string("1"));
      all = store_->add(kCountKey, 1) == names_.size();
      if (all) store_->set(kAllKey, std::string("1"));
    }));
    while (!all) {
      FSDP_RETURN_IF_ERROR(TorchToStatus(
          "the store broke off", [&] { all = store_->check({kAllKey}); }));
      if (all) break;
      FSDP_RETURN_IF_ERROR(LookAround());
      absl::SleepFor(Pause());
    }
    return absl::OkStatus();
  }

  // Tells the others of a failure and returns it, or the failure that another
  // rank has told before.
  absl::Status Tell(const absl::Status& failure) {
    std::string first;
    const absl::Status told = TorchToStatus("tell the others", [&] {
      first =
          store_->compareSet(kFailureKey, std::string(),
                             absl::StrCat(rank_, " ", EncodeStatus(failure)));
    });
    // A store that is gone tells nobody anything.
    if (!told.ok()) return failure;
    const absl::Status status = ReadFailure(first);
    // If both are alike, this rank's own says more.
    return status.code() == failure.code() ? failure : status;
  }

 private:
  // Returns an error if there is nothing left to wait for.
  absl::Status LookAround() {
    std::string failure;
    FSDP_RETURN_IF_ERROR(TorchToStatus("the store broke off", [&] {
      if (store_->check({kFailureKey})) {
        failure = store_->get_to_str(kFailureKey);
      }
    }));
    if (!failure.empty()) return ReadFailure(failure);
    if (limits_.stopped()) {
      return Tell(absl::CancelledError(
          absl::StrCat(names_.Name(rank_), " was asked to stop")));
    }
    return limits_.passed() ? Tell(Late()) : absl::OkStatus();
  }

  absl::Status Late() {
    std::vector<std::string> missing;
    FSDP_RETURN_IF_ERROR(TorchToStatus("the store broke off", [&] {
      for (int rank = 0; rank < names_.size(); ++rank) {
        if (!store_->check({ThroughKey(rank)})) {
          missing.push_back(names_.Name(rank));
        }
      }
    }));
    return absl::DeadlineExceededError(
        absl::StrCat("not connected to all others at the deadline: ",
                     absl::StrJoin(missing, ", ")));
  }

  // Parses "2 9 the message": rank, code and message.
  absl::Status ReadFailure(absl::string_view text) const {
    const size_t end = text.find(' ');
    int rank = 0;
    if (end != absl::string_view::npos &&
        absl::SimpleAtoi(text.substr(0, end), &rank) && rank >= 0 &&
        rank < names_.size()) {
      const std::optional<absl::Status> failure =
          DecodeStatus(text.substr(end + 1));
      if (failure.has_value() && !failure->ok()) {
        return rank == rank_ ? *failure : Annotate(*failure, names_.Name(rank));
      }
    }
    return absl::UnavailableError(
        "a rank has failed; what it says cannot be read");
  }

  // Grows with the time waited, to ask the store ever more rarely.
  absl::Duration Pause() const {
    return std::clamp((absl::Now() - begin_) / 10, absl::Milliseconds(1),
                      absl::Milliseconds(100));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const RankNames& names_;
  const WaitLimits& limits_;
  const absl::Time begin_;
};

std::string Key(absl::string_view topic, int rank) {
  return absl::StrCat(topic, "/", rank);
}

}  // namespace

absl::Status ConnectTogether(const c10::intrusive_ptr<c10d::Store>& store,
                             int rank, const RankNames& names,
                             const WaitLimits& limits,
                             std::function<absl::Status()> connect) {
  c10::intrusive_ptr<c10d::Store> own_store;
  // A client is for one thread at a time, and `connect` may use the caller's.
  FSDP_RETURN_IF_ERROR(TorchToStatus("open one more connection to the store",
                                     [&] { own_store = store->clone(); }));
  Session session(std::move(own_store), rank, names, limits);
  const auto attempt = std::make_shared<Attempt>();
  absl::StatusOr<std::thread> thread = StartThread(
      "to connect", [attempt, connect = std::move(connect)]() mutable {
        attempt->result = TorchToStatus("connect", connect);
        connect = nullptr;
        attempt->ended.Notify();
      });
  if (!thread.ok()) return session.Tell(thread.status());
  const absl::Status own = session.AwaitOwn(*attempt);
  if (attempt->ended.HasBeenNotified()) {
    thread->join();
  } else {
    thread->detach();
  }
  return own.ok() ? session.AwaitOthers() : own;
}

bool CallInTime(std::function<void()> call, absl::Time deadline) {
  const auto ended = std::make_shared<absl::Notification>();
  absl::StatusOr<std::thread> thread = StartThread(
      "for a call that may hang", [call = std::move(call), ended]() mutable {
        call();
        call = nullptr;
        ended->Notify();
      });
  if (!thread.ok()) return false;
  const bool is_over = ended->WaitForNotificationWithDeadline(deadline);
  if (is_over) {
    thread->join();
  } else {
    thread->detach();
  }
  return is_over;
}

bool AwaitKeys(c10d::Store& store, const std::vector<std::string>& keys,
               const WaitLimits& limits) {
  const absl::Time begin = absl::Now();
  while (!store.check(keys)) {
    if (limits.stopped() || limits.passed()) return false;
    const absl::Time now = absl::Now();
    const absl::Duration delay = std::clamp(
        (now - begin) / 10, absl::Milliseconds(1), absl::Milliseconds(200));
    absl::SleepFor(std::min(delay, limits.deadline - now));
  }
  return true;
}

absl::StatusOr<std::vector<std::string>> ExchangeByStore(
    const c10::intrusive_ptr<c10d::Store>& store, absl::string_view topic,
    int rank, const RankNames& names, const absl::StatusOr<std::string>& value,
    absl::Time deadline,
    const std::function<absl::Status(int, absl::string_view)>& check) {
  const std::string what =
      absl::StrCat("exchanging ", topic, " on ", names.Place(rank));
  const std::string own =
      value.ok() ? *value : absl::StrCat(kFailed, EncodeStatus(value.status()));
  const absl::Status told = TorchToStatus(what, [&] {
    store->set(Key(topic, rank), std::vector<uint8_t>(own.begin(), own.end()));
  });
  FSDP_RETURN_IF_ERROR(value.status());
  FSDP_RETURN_IF_ERROR(told);
  std::vector<std::string> values;
  std::vector<std::string> missing;
  for (int peer = 0; peer < names.size(); ++peer) {
    bool has_come = false;
    std::vector<uint8_t> bytes;
    const absl::Status status = TorchToStatus(what, [&] {
      has_come = AwaitKeys(*store, {Key(topic, peer)}, {deadline});
      if (has_come) bytes = store->get(Key(topic, peer));
    });
    if (!status.ok()) return absl::UnavailableError(status.message());
    values.emplace_back(bytes.begin(), bytes.end());
    if (!has_come) {
      missing.push_back(names.Name(peer));
      continue;
    }
    absl::string_view failure = values.back();
    if (!absl::ConsumePrefix(&failure, kFailed)) {
      if (check) FSDP_RETURN_IF_ERROR(check(peer, values.back()));
      continue;
    }
    const std::optional<absl::Status> error = DecodeStatus(failure);
    return Annotate(error.has_value() && !error->ok()
                        ? *error
                        : absl::UnavailableError("what it says is no error"),
                    names.Name(peer));
  }
  if (missing.empty()) return values;
  return absl::DeadlineExceededError(
      absl::StrCat(what, ": ", absl::StrJoin(missing, ", "),
                   missing.size() == 1 ? " has" : " have", " not come"));
}

}  // namespace fsdp::comm
