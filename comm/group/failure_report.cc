#include "comm/group/failure_report.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {

namespace {

// A store is for short values.
constexpr size_t kMaxTextBytes = 2048;

// Returns the rank whose report explains the others, `rank` in doubt.
int RootCause(int rank, absl::Span<const std::optional<RankReport>> reports) {
  int best = rank;
  for (size_t peer = 0; peer < reports.size(); ++peer) {
    // A peer that left only explains a lost connection; see Elsewhere().
    if (!reports[peer] || reports[peer]->cause == Cause::kLeft) continue;
    if (reports[peer]->cause < reports[best]->cause) {
      best = static_cast<int>(peer);
    }
  }
  return best;
}

std::string Elsewhere(int rank, const RankNames& names,
                      absl::Span<const std::optional<RankReport>> reports,
                      bool store_answers) {
  std::vector<std::string> known;
  std::vector<std::string> silent;
  for (int peer = 0; peer < names.size(); ++peer) {
    if (peer == rank) continue;
    if (!reports[peer]) {
      silent.push_back(names.Name(peer));
    } else if (reports[peer]->cause == Cause::kLeft) {
      known.push_back(absl::StrCat(names.Name(peer), " has left the group: it ",
                                   reports[peer]->position));
    } else {
      known.push_back(
          absl::StrCat(names.Name(peer), " ", reports[peer]->position));
    }
  }
  if (!silent.empty() && store_answers) {
    known.push_back(absl::StrCat(absl::StrJoin(silent, ", "),
                                 silent.size() == 1 ? " does" : " do",
                                 " not answer: dead, stopped or cut off"));
  } else if (!silent.empty()) {
    known.push_back(absl::StrCat(
        "nothing is known of ", absl::StrJoin(silent, ", "),
        ", because the store does not answer: the process that serves it, "
        "often ",
        names.NameInWorld(0), ", is dead, stopped or cut off"));
  }
  return absl::StrJoin(known, "; ");
}

constexpr absl::Duration kPollInterval = absl::Milliseconds(10);
// The longest wait of the destructor for a thread, which is then left behind.
constexpr absl::Duration kPatience = absl::Seconds(1);
// The longest wait of a leaving rank for the store, which may never answer.
constexpr absl::Duration kGoodbyeTimeout = absl::Seconds(3);
// The limit of one wait in the store, which must fit poll()'s int of ms.
constexpr absl::Duration kOneWatch = absl::Hours(24 * 20);

std::string ReportKey(int rank) { return absl::StrCat("report/", rank); }
std::string BellKey(int rank) { return absl::StrCat("bell/", rank); }

// Removes "[/path/to/pair.cc:547] " and the C++ stack that follows the first
// line.
std::string Shortened(absl::string_view message) {
  std::string text(message.substr(0, message.find('\n')));
  const size_t begin = text.find("[/");
  const size_t end = text.find("] ", begin);
  if (end != std::string::npos) text.erase(begin, end + 2 - begin);
  return text;
}

}  // namespace

std::string Encode(const RankReport& report) {
  return absl::StrCat(static_cast<int>(report.cause), "\n", report.position,
                      "\n",
                      absl::string_view(report.text).substr(0, kMaxTextBytes));
}

std::optional<RankReport> Decode(absl::string_view text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('\n', 2));
  int cause = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &cause) || cause < 0 ||
      cause > static_cast<int>(Cause::kEcho)) {
    return std::nullopt;
  }
  return RankReport{static_cast<Cause>(cause), std::string(parts[2]),
                    std::string(parts[1])};
}

bool Explains(absl::Span<const std::optional<RankReport>> reports) {
  bool complete = true;
  for (const auto& report : reports) {
    if (report &&
        (report->cause == Cause::kAbort || report->cause == Cause::kMismatch)) {
      return true;
    }
    complete = complete && report.has_value();
  }
  return complete;
}

absl::Status Verdict(int rank, const RankNames& names,
                     absl::Span<const std::optional<RankReport>> reports,
                     bool store_answers) {
  FSDP_CHECK(reports[rank].has_value());
  FSDP_CHECK(static_cast<int>(reports.size()) == names.size());
  const int root = RootCause(rank, reports);
  const RankReport& why = *reports[root];
  switch (why.cause) {
    case Cause::kAbort:
      return absl::AbortedError(
          absl::StrCat(names.Name(root), " aborted: ", why.text));
    case Cause::kMismatch:
      return absl::InvalidArgumentError(why.text);
    case Cause::kDeadline: {
      const std::string elsewhere =
          Elsewhere(root, names, reports, store_answers);
      if (root == rank) {
        return absl::DeadlineExceededError(
            absl::StrCat(why.text, "; ", elsewhere));
      }
      return absl::AbortedError(
          absl::StrCat(names.Name(root), ", which ", why.position,
                       ", gave up: ", why.text, "; ", elsewhere));
    }
    case Cause::kLeft:
      return absl::UnavailableError(why.text);
    case Cause::kLost:
    case Cause::kEcho:
      return absl::UnavailableError(absl::StrCat(
          why.text, "; ", Elsewhere(rank, names, reports, store_answers)));
  }
  return absl::InternalError("a cause that has no meaning");
}

// State of the threads, which may outlive the exchange inside a store call.
struct ReportExchange::State {
  State(int rank_in, int world_size_in)
      : rank(rank_in), world_size(world_size_in), reports(world_size_in) {}

  // Blocks until a peer alarms this rank, or the destructor does.
  void Watch(const std::function<void()>& on_alarm) {
    const absl::Status rung = TorchToStatus("watch for failures", [this] {
      while (!AwaitBell()) {
      }
    });
    {
      absl::MutexLock lock(&mutex);
      alarming = rung.ok() && !stopping;
      if (!alarming) {
        watch_ended = true;
        return;
      }
    }
    on_alarm();
    absl::MutexLock lock(&mutex);
    alarming = false;
    watch_ended = true;
  }

  // Returns false if nobody rings within the limit of one wait.
  bool AwaitBell() {
    try {
      watch_store->wait({BellKey(rank)}, absl::ToChronoMilliseconds(kOneWatch));
    } catch (const c10::DistStoreError&) {
      return false;
    }
    return true;
  }

  // Publishes `report` and polls for the others'.
  void Collect(const RankReport& report, absl::Time until) {
    absl::Status status = TorchToStatus("publish a failure", [&] {
      store->set(ReportKey(rank), Encode(report));
    });
    for (int peer = 0; peer < world_size && report.cause != Cause::kEcho;
         ++peer) {
      if (peer != rank && status.ok()) status = Ring(peer);
    }
    while (status.ok()) {
      status = Poll();
      absl::MutexLock lock(&mutex);
      if (Explains(reports) || absl::Now() >= until) break;
      if (mutex.AwaitWithTimeout(absl::Condition(&stopping), kPollInterval)) {
        break;
      }
    }
    absl::MutexLock lock(&mutex);
    store_answers = status.ok();
    collect_ended = true;
  }

  absl::Status Poll() {
    for (int peer = 0; peer < world_size; ++peer) {
      {
        absl::MutexLock lock(&mutex);
        if (reports[peer]) continue;
      }
      std::optional<RankReport> report;
      FSDP_RETURN_IF_ERROR(TorchToStatus("look for a peer's report", [&] {
        if (store->check({ReportKey(peer)})) {
          report = Decode(store->get_to_str(ReportKey(peer)));
        }
      }));
      absl::MutexLock lock(&mutex);
      reports[peer] = std::move(report);
    }
    return absl::OkStatus();
  }

  absl::Status Ring(int peer) {
    return TorchToStatus("tell a peer of the failure",
                         [&] { store->set(BellKey(peer), std::string("1")); });
  }

  const int rank;
  const int world_size;
  c10::intrusive_ptr<c10d::Store> watch_store;
  // Serves everything but watching, for one thread at a time.
  c10::intrusive_ptr<c10d::Store> store;

  absl::Mutex mutex;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool alarming ABSL_GUARDED_BY(mutex) = false;  // on_alarm is running
  bool watch_ended ABSL_GUARDED_BY(mutex) = true;
  bool collect_ended ABSL_GUARDED_BY(mutex) = true;
  bool store_answers ABSL_GUARDED_BY(mutex) = true;
  std::vector<std::optional<RankReport>> reports ABSL_GUARDED_BY(mutex);
  std::thread watcher;
  // Runs Collect() or CallBriefly().
  std::thread collector ABSL_GUARDED_BY(mutex);
};

absl::StatusOr<std::unique_ptr<ReportExchange>> ReportExchange::Create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size) {
  auto state = std::make_shared<State>(rank, world_size);
  FSDP_RETURN_IF_ERROR(
      TorchToStatus("open two more connections to the store", [&] {
        state->watch_store = store->clone();
        state->store = store->clone();
      }));
  return std::unique_ptr<ReportExchange>(new ReportExchange(std::move(state)));
}

ReportExchange::ReportExchange(std::shared_ptr<State> state)
    : state_(std::move(state)) {}

void ReportExchange::CallBriefly(const std::function<absl::Status()>& call) {
  state_->mutex.AssertHeld();
  state_->collect_ended = false;
  const auto run = [state = state_, call] {
    const absl::Status status = call();
    absl::MutexLock lock(&state->mutex);
    state->store_answers = status.ok();
    state->collect_ended = true;
  };
  absl::StatusOr<std::thread> thread = StartThread("to take leave", run);
  if (thread.ok()) {
    state_->collector = *std::move(thread);
  } else {
    // No thread could be started, but the others have to be told.
    state_->mutex.Unlock();
    run();
    state_->mutex.Lock();
  }
  state_->mutex.AwaitWithTimeout(absl::Condition(&state_->collect_ended),
                                 kGoodbyeTimeout);
}

void ReportExchange::Leave(const RankReport& report) {
  absl::MutexLock lock(&state_->mutex);
  if (state_->reports[state_->rank]) return;
  state_->reports[state_->rank] = report;
  // An error is lost: if the store is gone, the peers cannot be told.
  CallBriefly([state = state_, report] {
    return TorchToStatus("say goodbye", [&] {
      state->store->set(ReportKey(state->rank), Encode(report));
    });
  });
}

ReportExchange::~ReportExchange() { Stop(); }

absl::Status ReportExchange::Start(std::function<void()> on_alarm) {
  absl::MutexLock lock(&state_->mutex);
  FSDP_ASSIGN_OR_RETURN(
      state_->watcher,
      StartThread("to watch for failures of other ranks",
                  [state = state_, alarm = std::move(on_alarm)] {
                    state->Watch(alarm);
                  }));
  state_->watch_ended = false;
  return absl::OkStatus();
}

void ReportExchange::Stop() {
  const auto join = [this](std::thread& thread, const bool* ended) {
    state_->mutex.AssertHeld();
    if (!thread.joinable()) return;
    if (!state_->mutex.AwaitWithTimeout(absl::Condition(ended), kPatience)) {
      thread.detach();
      return;
    }
    state_->mutex.Unlock();
    thread.join();
    state_->mutex.Lock();
  };
  absl::MutexLock lock(&state_->mutex);
  state_->stopping = true;
  join(state_->collector, &state_->collect_ended);
  if (state_->collect_ended && state_->store_answers && !state_->watch_ended) {
    // Wakes the watcher.
    CallBriefly([state = state_] { return state->Ring(state->rank); });
    join(state_->collector, &state_->collect_ended);
  }
  state_->mutex.Await(absl::Condition(
      +[](State* state) { return !state->alarming; }, state_.get()));
  join(state_->watcher, &state_->watch_ended);
}

void ReportExchange::Report(const RankReport& report,
                            absl::Duration collect_for) {
  {
    absl::MutexLock lock(&state_->mutex);
    if (state_->reports[state_->rank] || state_->stopping) return;
    state_->reports[state_->rank] = report;
    state_->collect_ended = false;
    absl::StatusOr<std::thread> collector = StartThread(
        "to tell of a failure",
        [state = state_, report, until = absl::Now() + collect_for] {
          state->Collect(report, until);
        });
    if (collector.ok()) {
      state_->collector = *std::move(collector);
      return;
    }
  }
  // No thread could be started, but the others have to be told.
  state_->Collect(report, absl::InfinitePast());
}

ReportExchange::Findings ReportExchange::Await(absl::Time deadline) {
  const auto known = [this]() {
    state_->mutex.AssertHeld();
    // Report() may be on its way in another thread.
    return state_->reports[state_->rank].has_value() &&
           (state_->collect_ended || Explains(state_->reports));
  };
  absl::MutexLock lock(&state_->mutex);
  const bool in_time =
      state_->mutex.AwaitWithDeadline(absl::Condition(&known), deadline);
  return {state_->reports, in_time && state_->store_answers};
}

std::string RankList(absl::Span<const int> ranks) {
  constexpr size_t kMostListed = 16;  // longer lists tell nobody anything
  const size_t listed = std::min(ranks.size(), kMostListed);
  return absl::StrCat(
      ranks.size() == 1 ? "rank " : "ranks ",
      absl::StrJoin(ranks.first(listed), ", "),
      listed < ranks.size()
          ? absl::StrCat(" and ", ranks.size() - listed, " more")
          : "");
}

std::string EncodeStatus(const absl::Status& status) {
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

std::optional<absl::Status> DecodeStatus(absl::string_view text) {
  const size_t end = text.find(' ');
  int code = 0;
  if (end == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(0, end), &code) ||
      code < static_cast<int>(absl::StatusCode::kOk) ||
      code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return std::nullopt;
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      text.substr(end + 1));
}

absl::Status ConnectionError(const absl::Status& status) {
  return absl::UnavailableError(Shortened(status.message()));
}

absl::Status C10dToStatus(absl::string_view what, FallibleRef fn) {
  absl::Status status = TorchToStatus(what, fn);
  if (status.ok()) return status;
  if (absl::IsUnknown(status)) return ConnectionError(status);
  const std::string text = Shortened(status.message());
  // c10d::Backend says so itself.
  if (absl::IsInternal(status) && absl::StrContains(text, "does not support")) {
    return absl::UnimplementedError(text);
  }
  return absl::Status(status.code(), text);
}

}  // namespace fsdp::comm
