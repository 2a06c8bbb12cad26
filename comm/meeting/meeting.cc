#include "comm/meeting/meeting.h"

#include <algorithm>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/connect_together.h"
#include "comm/group/failure_report.h"
#include "comm/meeting/job_store.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr char kWorldSizeKey[] = "world_size";
constexpr char kArrivalsKey[] = "arrivals";
constexpr char kVisitorsKey[] = "visitors";
constexpr char kVerdictKey[] = "verdict";
constexpr char kMasterAddressKey[] = "master_address";

// The prefix of all keys, behind that of a store that rank 0 does not serve.
constexpr char kPrefix[] = "/fsdp";

// The least limit of answers, which a late rank needs for the whole job, too.
constexpr absl::Duration kLeastAnswerTime = absl::Seconds(5);
// The longest wait of rank 0 for the others' goodbyes.
constexpr absl::Duration kGoodbyeTimeout = absl::Seconds(3);

bool IsServedByRank0(const Environment& environment) {
  return !environment.kept_store && !environment.agent_store;
}

std::string PrefixOf(const Environment& environment) {
  return absl::StrCat(environment.kept_store ? environment.kept_store_prefix
                                             : environment.agent_store_prefix,
                      kPrefix);
}

std::string ClaimKey(int rank) { return absl::StrCat("claim/", rank); }
std::string GoodbyeKey(int64_t number) {
  return absl::StrCat("goodbye/", number);
}

// Says goodbye in its destructor if it has entered.
class PoliteStore final : public c10d::PrefixStore {
 public:
  // `server` serves the store and ends with this object; it is null if another
  // process serves the store.
  PoliteStore(std::string prefix, StorePtr store,
              std::unique_ptr<StoreServer> server)
      : PrefixStore(std::move(prefix), std::move(store)),
        server_(std::move(server)) {}

  ~PoliteStore() override {
    // A peer that is gone cannot be waited for, nor told: an error here has no
    // consequence.
    TorchToStatus("goodbye", [this] {
      setTimeout(absl::ToChronoMilliseconds(kGoodbyeTimeout));
      if (number_ > 0) set(GoodbyeKey(number_), std::vector<uint8_t>{1});
      if (server_ != nullptr) AwaitGoodbyes();
    }).IgnoreError();
  }

  // Makes this process one whose goodbye is waited for. Processes have numbers
  // of their own, since two may claim the same rank.
  void Enter() { number_ = add(kVisitorsKey, 1); }

  // Makes the destructor wait for so many goodbyes, also of latecomers.
  void Expect(int64_t visitors) { expected_ = visitors; }

 private:
  void AwaitGoodbyes() {
    const int64_t visitors = std::max(expected_, add(kVisitorsKey, 0));
    std::vector<std::string> goodbyes;
    for (int64_t number = 1; number <= visitors; ++number) {
      goodbyes.push_back(GoodbyeKey(number));
    }
    if (goodbyes.empty()) return;
    AwaitKeys(*this, goodbyes, {absl::Now() + kGoodbyeTimeout});
  }

  const std::unique_ptr<StoreServer> server_;
  int64_t number_ = 0;  // 0: has not entered
  int64_t expected_ = 0;
};

// Returns "; refused, ...: 2 callers ...", or "" if nobody was refused.
std::string Refusals(PoliteStore& store) {
  // A refused caller has named no group, so that refusals are counted outside.
  c10d::Store& all = *store.getUnderlyingStore();
  if (!all.check({kRefusalsKey})) return "";
  return absl::StrCat("; refused, since they do not know the job's secret: ",
                      all.add(kRefusalsKey, 0),
                      " callers; FSDP_JOB_SECRET has to be the same on all "
                      "ranks, or set on none");
}

absl::Status MissingError(PoliteStore& store, const Environment& environment) {
  std::vector<int> missing;
  for (int rank = 0; rank < environment.world_size; ++rank) {
    if (!store.check({ClaimKey(rank)})) missing.push_back(rank);
  }
  return absl::DeadlineExceededError(absl::StrCat(
      environment.world_size - missing.size(), " of ", environment.world_size,
      " ranks met at ", environment.master_addr, ":", environment.master_port,
      "; missing: ", RankList(missing), " (started by ",
      Name(environment.started_by),
      environment.started_by == StartedBy::kSlurm
          ? "; ranks are those that srun starts"
          : "",
      ")", Refusals(store)));
}

// The first verdict counts and is everybody's.
void Decide(c10d::Store& store, const absl::Status& verdict) {
  store.compareSet(kVerdictKey, std::string(), EncodeStatus(verdict));
}

absl::Status ReadVerdict(c10d::Store& store) {
  const std::string text = store.get_to_str(kVerdictKey);
  return DecodeStatus(text).value_or(absl::UnavailableError(
      absl::StrCat("the verdict \"", absl::CHexEscape(text),
                   "\" in the store cannot be read")));
}

// Registers this rank; returns an error if it does not fit the others.
absl::Status Arrive(c10d::Store& store, const Environment& environment) {
  const std::string world_size = absl::StrCat(environment.world_size);
  const std::string first =
      store.compareSet(kWorldSizeKey, std::string(), world_size);
  if (first != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", environment.rank, " was started as one of ",
                     world_size, " ranks, another one as one of ", first,
                     "; all need the same world size"));
  }
  if (store.add(ClaimKey(environment.rank), 1) != 1) {
    return absl::AlreadyExistsError(
        absl::StrCat("two processes came as rank ", environment.rank, " of ",
                     world_size, ", or one of them came twice"));
  }
  if (store.add(kArrivalsKey, 1) == environment.world_size) {
    Decide(store, absl::OkStatus());
  }
  return absl::OkStatus();
}

absl::Status AwaitAll(PoliteStore& store, const Environment& environment,
                      const WaitLimits& limits) {
  return TorchToStatus("the store broke off", [&] {
    absl::Status own = Arrive(store, environment);
    if (!own.ok()) {
      Decide(store, own);
    } else if (!AwaitKeys(store, {kVerdictKey}, limits)) {
      if (limits.stopped()) {
        const std::string text = absl::StrCat(
            "rank ", environment.rank,
            " was asked to stop while it waited for the other ranks");
        Decide(store, absl::AbortedError(text));
        own = absl::CancelledError(text);
      } else {
        Decide(store, MissingError(store, environment));
      }
    }
    const absl::Status verdict = ReadVerdict(store);
    // A surplus rank finds that the others have met, and returns its own error.
    return verdict.ok() || absl::IsCancelled(own) ? own : verdict;
  });
}

absl::StatusOr<Listener> OpenListener(const Environment& environment) {
  if (environment.listen_fd >= 0) {
    absl::StatusOr<Listener> inherited =
        AdoptListener(environment.listen_fd, environment.master_port);
    // Otherwise an earlier group of this process has used the socket up, and
    // the port is free again.
    if (inherited.ok()) return inherited;
  }
  return Listen(environment.master_addr, environment.master_port);
}

struct OpenedStore {
  StorePtr client;
  std::unique_ptr<StoreServer> server;  // on rank 0
};

// Opens the store of torchrun's agent, which has a protocol of its own.
absl::StatusOr<OpenedStore> OpenAgentStore(const Environment& environment,
                                           absl::Time deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port);
  options.waitWorkers = false;
  options.timeout = absl::ToChronoMilliseconds(
      std::max(absl::Seconds(1), deadline - absl::Now()));
  OpenedStore opened;
  FSDP_RETURN_IF_ERROR(TorchToStatus("open the store", [&] {
    opened.client =
        c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  }));
  return opened;
}

absl::StatusOr<OpenedStore> OpenStore(const Environment& environment,
                                      bool hosts, const WaitLimits& limits) {
  if (environment.agent_store && !environment.kept_store) {
    return OpenAgentStore(environment, limits.deadline);
  }
  OpenedStore opened;
  JobStorePlace place{environment.master_addr, environment.master_port,
                      environment.secret};
  if (hosts) {
    FSDP_ASSIGN_OR_RETURN(Listener listener, OpenListener(environment));
    FSDP_ASSIGN_OR_RETURN(
        opened.server,
        StoreServer::Start(std::move(listener.fd), environment.secret));
    // Hosts need not be able to reach themselves by the name others use.
    if (!IsLoopback(place.address)) place.address = "127.0.0.1";
  }
  FSDP_ASSIGN_OR_RETURN(
      opened.client,
      JobStore::Connect(
          place, std::max(kLeastAnswerTime, limits.deadline - absl::Now()),
          limits));
  return opened;
}

absl::StatusOr<Route> FindRoute(const Environment& environment,
                                const WaitLimits& limits) {
  absl::StatusOr<Connection> connection =
      ConnectTo(environment.master_addr, environment.master_port, limits);
  if (connection.ok()) return std::move(connection->route);
  const absl::Status& failed = connection.status();
  if (absl::IsCancelled(failed)) return failed;
  return absl::Status(
      failed.code(),
      absl::StrCat(
          failed.message(),
          environment.kept_store ? "; does the keeper" : "; does rank 0",
          " run there, and does no firewall keep this host from it?"));
}

}  // namespace

absl::Status Meet(const Environment& environment, const WaitLimits& limits,
                  Suspect* suspect, MeetingPlace* place) {
  const bool hosts = environment.rank == 0 && IsServedByRank0(environment);
  Route route;
  route.local = "127.0.0.1";
  if (!hosts) {
    FSDP_ASSIGN_OR_RETURN(route, FindRoute(environment, limits));
  }
  *suspect =
      "the store where the ranks meet accepts connections but does not answer; "
      "is the process that serves it, often rank 0, stopped?";
  FSDP_ASSIGN_OR_RETURN(OpenedStore opened,
                        OpenStore(environment, hosts, limits));
  auto polite = c10::make_intrusive<PoliteStore>(PrefixOf(environment),
                                                 std::move(opened.client),
                                                 std::move(opened.server));
  FSDP_RETURN_IF_ERROR(TorchToStatus("the store broke off", [&] {
    if (IsServedByRank0(environment)) polite->Enter();
    if (!IsLoopback(route.local)) {
      polite->c10d::Store::set(kMasterAddressKey, route.remote);
    }
  }));
  place->store = polite;
  absl::Status met = AwaitAll(*polite, environment, limits);
  if (!met.ok()) {
    // Ranks that are still on the way learn the reason, too.
    const bool is_wrong =
        absl::IsInvalidArgument(met) || absl::IsAlreadyExists(met);
    if (is_wrong) polite->Expect(environment.world_size);
    return met;
  }
  place->local_address = route.local;
  // A host may know itself by a loopback address only, while others reach it by
  // another: ranks beside rank 0 take the address that ranks elsewhere see.
  return TorchToStatus("the store broke off", [&] {
    if (IsLoopback(route.local) && polite->check({kMasterAddressKey})) {
      place->local_address = polite->get_to_str(kMasterAddressKey);
    }
  });
}

}  // namespace fsdp::comm
