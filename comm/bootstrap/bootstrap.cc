#include "comm/bootstrap/bootstrap.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/group/connect_together.h"
#include "comm/group/operation_watchdog.h"
#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/hierarchical/host_layout.h"
#include "comm/host/shared_segment.h"
#include "comm/inspection/inspector.h"
#include "comm/inspection/peer_records.h"
#include "comm/local/local_communicator.h"
#include "comm/meeting/meeting.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "comm/wrappers/paired_communicator.h"

namespace fsdp::comm {
namespace {

using CommunicatorPtr = std::unique_ptr<Communicator>;
using Connector =
    std::function<CreatedCommunicator(Suspect* suspect, MeetingPlace* place)>;

// Extra time for the inner steps of a connection to say why it fails.
constexpr absl::Duration kSlack = absl::Seconds(1);
// The longest wait for a thread with a result, which may be saying goodbye.
constexpr absl::Duration kGoodbye = absl::Seconds(5);
constexpr absl::Duration kStopInterval = absl::Milliseconds(50);

struct Progress {
  Suspect suspect{
      "the host where the ranks meet cannot be found: its name is not "
      "resolved, or it takes no connection"};
  absl::Notification has_result;
  CreatedCommunicator result;  // once `has_result`
  absl::Notification is_over;
};

// Returns whether there is a result.
bool AwaitResult(const Progress& progress, const WaitLimits& limits) {
  absl::Time until = limits.deadline;
  bool stopping = false;
  while (!progress.has_result.HasBeenNotified() && absl::Now() < until) {
    if (!stopping && limits.stopped()) {
      stopping = true;
      until = std::min(until, absl::Now() + kSlack);
    }
    progress.has_result.WaitForNotificationWithDeadline(
        std::min(until, absl::Now() + kStopInterval));
  }
  return progress.has_result.HasBeenNotified();
}

// Runs `connect` in a thread, because c10d's store may never answer: the thread
// is then left behind with what it holds. The thread gives back what a failed
// attempt has left in `place` only after its error is known, because rank 0
// waits there for the others' goodbyes, possibly beyond any deadline.
CreatedCommunicator ConnectBefore(const WaitLimits& limits, Connector connect) {
  const auto progress = std::make_shared<Progress>();
  FSDP_ASSIGN_OR_RETURN(
      std::thread thread,
      StartThread("to connect", [progress, connect = std::move(connect)] {
        MeetingPlace place;
        progress->result = connect(&progress->suspect, &place);
        progress->has_result.Notify();
        place = MeetingPlace();
        progress->is_over.Notify();
      }));
  const bool has_result = AwaitResult(*progress, limits);
  if (has_result &&
      progress->is_over.WaitForNotificationWithTimeout(kGoodbye)) {
    thread.join();
  } else {
    thread.detach();
  }
  if (has_result) return std::move(progress->result);
  if (limits.stopped()) {
    return absl::CancelledError("asked to stop while ranks were connecting");
  }
  return absl::DeadlineExceededError(progress->suspect.load());
}

// Returns a text that processes have in common if they may share memory.
std::string HostName(const ConnectOptions& options) {
  return absl::StrCat(options.host, "/", HostIdentity());
}

CreatedCommunicator Paired(CommunicatorPtr host, const Environment& environment,
                           const ConnectOptions& options,
                           c10::intrusive_ptr<c10d::Store> store) {
  if (!options.device) return host;
  FSDP_ASSIGN_OR_RETURN(
      CommunicatorPtr device,
      options.device(
          {std::move(store), environment.local_rank, options.timeout, *host}));
  return CreatePairedCommunicator(std::move(host), std::move(device));
}

// Connects ranks that have met.
class MetRanks {
 public:
  // All outlive it.
  MetRanks(const Environment& environment, const ConnectOptions& options,
           const MeetingPlace& place, absl::Time deadline)
      : environment_(environment),
        options_(options),
        place_(place),
        deadline_(deadline) {}

  c10::intrusive_ptr<c10d::Store> StoreOf(const std::string& group) const {
    return c10::make_intrusive<c10d::PrefixStore>(group, place_.store);
  }

  CreatedCommunicator Connect() const {
    FSDP_ASSIGN_OR_RETURN(CommunicatorPtr host,
                          options_.backend == Backend::kGloo ? ConnectGloo()
                          : options_.backend == Backend::kSharedMemory
                              ? ConnectSharedMemory()
                              : ConnectAuto());
    return Paired(std::move(host), environment_, options_, StoreOf("device"));
  }

 private:
  // Connects the ranks in the way that is fastest on their hosts.
  CreatedCommunicator ConnectAuto() const {
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::string> hosts,
        ExchangeByStore(StoreOf("hosts"), "names", environment_.rank,
                        RankNames(environment_.world_size), HostName(options_),
                        deadline_));
    const absl::StatusOr<HostLayout> layout = ArrangeHosts(hosts);
    CreatedCommunicator sharing =
        absl::FailedPreconditionError("every host has one rank");
    if (!layout.ok()) {
      sharing = layout.status();
    } else if (layout->num_hosts == 1) {
      sharing = ConnectSharedMemory();
    } else if (layout->ranks_per_host > 1) {
      sharing = ConnectHierarchical(*layout);
    }
    if (!absl::IsFailedPrecondition(sharing.status())) return sharing;
    return ConnectGloo(absl::StrCat(" without shared memory (",
                                    sharing.status().message(), ")"));
  }

  CreatedCommunicator ConnectSharedMemory() const {
    return ConnectSharedMemory(StoreOf("shared_memory"), environment_.rank,
                               environment_.world_size, /*world_ranks=*/{});
  }
  CreatedCommunicator ConnectSharedMemory(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
      std::vector<int> world_ranks) const {
    SharedMemoryOptions shared_memory;
    shared_memory.world_ranks = std::move(world_ranks);
    shared_memory.timeout = options_.timeout;
    shared_memory.host = options_.host;
    return CreateSharedMemoryCommunicator(store, rank, world_size,
                                          shared_memory);
  }

  CreatedCommunicator ConnectGloo(absl::string_view note = "") const {
    return ConnectGloo(place_.store, environment_.rank, environment_.world_size,
                       /*world_ranks=*/{}, note);
  }
  CreatedCommunicator ConnectGloo(const c10::intrusive_ptr<c10d::Store>& store,
                                  int rank, int world_size,
                                  std::vector<int> world_ranks,
                                  absl::string_view note = "") const {
    GlooOptions gloo;
    gloo.note = std::string(note);
    gloo.world_ranks = std::move(world_ranks);
    gloo.timeout = options_.timeout;
    gloo.connect_timeout =
        std::max(absl::Milliseconds(1), deadline_ - absl::Now());
    gloo.interface =
        options_.interface.empty() ? environment_.interface : options_.interface;
    if (gloo.interface.empty()) gloo.hostname = place_.local_address;
    return CreateGlooCommunicator(store, rank, world_size, gloo);
  }

  // Returns FailedPrecondition, on all ranks alike, if the ranks of a host
  // cannot share memory.
  CreatedCommunicator ConnectHierarchical(const HostLayout& layout) const {
    const int rank = environment_.rank;
    const int host = layout.host(rank);
    auto inside = ConnectSharedMemory(StoreOf(absl::StrCat("host", host)),
                                      layout.place(rank), layout.ranks_per_host,
                                      layout.HostRanks(rank));
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::string> outcomes,
        ExchangeByStore(StoreOf("hosts"), "outcomes", rank,
                        RankNames(environment_.world_size),
                        inside.ok() ? "" : inside.status().ToString(),
                        deadline_));
    for (size_t peer = 0; peer < outcomes.size(); ++peer) {
      if (outcomes[peer].empty()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", peer,
          " cannot share memory inside its host: ", outcomes[peer]));
    }
    HierarchicalParts parts;
    parts.host = *std::move(inside);
    FSDP_ASSIGN_OR_RETURN(
        parts.rail,
        Annotate(ConnectGloo(StoreOf(absl::StrCat("rail", layout.place(rank))),
                             host, layout.num_hosts, layout.RailRanks(rank)),
                 "between hosts"));
    FSDP_ASSIGN_OR_RETURN(parts.network, ConnectGloo());
    return CreateHierarchicalCommunicator(std::move(parts));
  }

  const Environment& environment_;
  const ConnectOptions& options_;
  const MeetingPlace& place_;
  const absl::Time deadline_;
};

// Puts an inspector in front of a group. `peers` is null if it has one rank.
CreatedCommunicator Inspected(CommunicatorPtr ranks,
                              const Environment& environment,
                              const ConnectOptions& options,
                              std::unique_ptr<PeerRecords> peers) {
  InspectorOptions inspection;
  inspection.warn_after = options.warn_after;
  inspection.shows_failures = options.shows_failures;
  inspection.folder = options.inspection_folder.empty()
                          ? environment.inspection_folder
                          : options.inspection_folder;
  if (peers != nullptr) peers->Seal();
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<Inspector> inspector,
      Inspector::Start(std::move(inspection), std::move(peers)));
  return Inspect(std::move(ranks), std::move(inspector));
}

struct Connected {
  CommunicatorPtr ranks;
  std::unique_ptr<PeerRecords> peers;
};

CreatedCommunicator ConnectProcesses(const Environment& environment,
                                     const ConnectOptions& options,
                                     const WaitLimits& limits, Suspect* suspect,
                                     MeetingPlace* place) {
  if (environment.master_addr.empty()) {
    place->store = c10::make_intrusive<c10d::HashStore>();
    place->local_address = "127.0.0.1";
  } else {
    FSDP_RETURN_IF_ERROR(Meet(environment, limits, suspect, place));
  }
  *suspect =
      "a rank, or the store where the ranks meet, accepts connections but does "
      "not answer; is its process stopped?";
  const auto connected = std::make_shared<Connected>();
  const auto connect = [connected, environment, options, place = *place,
                        deadline = limits.deadline]() -> absl::Status {
    const MetRanks met(environment, options, place, deadline);
    FSDP_ASSIGN_OR_RETURN(connected->ranks, met.Connect());
    if (environment.world_size == 1) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(
        connected->peers,
        PeerRecords::Connect(met.StoreOf("inspection"), environment.rank,
                             environment.world_size, HostName(options),
                             deadline));
    return absl::OkStatus();
  };
  WaitLimits slower = limits;
  slower.deadline += 2 * kSlack;
  FSDP_RETURN_IF_ERROR(ConnectTogether(
      c10::make_intrusive<c10d::PrefixStore>("together", place->store),
      environment.rank, RankNames(environment.world_size), slower, connect));
  return Inspected(std::move(connected->ranks), environment, options,
                   std::move(connected->peers));
}

absl::Status CheckEnvironment(const Environment& environment) {
  if (environment.world_size < 1 || environment.rank < 0 ||
      environment.rank >= environment.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", environment.rank, " of ", environment.world_size,
                     ": expected 0 <= rank < world size"));
  }
  const bool has_place =
      !environment.master_addr.empty() && environment.master_port > 0;
  if (environment.world_size > 1 && !has_place) {
    return absl::InvalidArgumentError(
        absl::StrCat(environment.world_size,
                     " ranks need an address and a port at which to meet"));
  }
  if (environment.kept_store && environment.kept_store_prefix.empty()) {
    return absl::InvalidArgumentError(
        "kept_store_prefix is empty: expected one that no other group has had, "
        "since what a group leaves in a kept store stays there");
  }
  return absl::OkStatus();
}

CreatedCommunicator Dispatch(const Environment& environment,
                             const ConnectOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckEnvironment(environment));
  const bool is_alone = environment.world_size == 1;
  const bool is_local = options.backend == Backend::kLocal ||
                        (options.backend == Backend::kAuto && is_alone);
  if (is_local && is_alone) {
    FSDP_ASSIGN_OR_RETURN(
        std::vector<CommunicatorPtr> group,
        CreateLocalGroup(/*world_size=*/1, {options.timeout}));
    FSDP_ASSIGN_OR_RETURN(CommunicatorPtr both,
                          Paired(std::move(group[0]), environment, options,
                                 c10::make_intrusive<c10d::HashStore>()));
    return Inspected(std::move(both), environment, options, nullptr);
  }
  if (is_local) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the ranks of the local backend are threads of one process, and ",
        Name(environment.started_by), " started ", environment.world_size,
        " processes; use auto"));
  }
  const absl::Time deadline = absl::Now() + options.connect_timeout;
  // A thread that is left behind must not call the caller's function.
  const auto stopped = std::make_shared<std::atomic<bool>>(false);
  const WaitLimits inner{deadline, [stopped] { return stopped->load(); }};
  const auto connect = [=](Suspect* suspect, MeetingPlace* place) {
    return ConnectProcesses(environment, options, inner, suspect, place);
  };
  const auto stop_requested = [&options, stopped] {
    if (options.stop_requested && options.stop_requested()) *stopped = true;
    return stopped->load();
  };
  return ConnectBefore({deadline + 4 * kSlack, stop_requested}, connect);
}

}  // namespace

absl::StatusOr<Backend> ParseBackend(absl::string_view name) {
  if (name == "auto") return Backend::kAuto;
  if (name == "local") return Backend::kLocal;
  if (name == "shared_memory") return Backend::kSharedMemory;
  if (name == "gloo") return Backend::kGloo;
  return absl::InvalidArgumentError(
      absl::StrCat("the backend is \"", name,
                   "\": expected auto, local, shared_memory or gloo"));
}

CreatedCommunicator Connect(const Environment& environment,
                            const ConnectOptions& options) {
  std::string what = absl::StrCat("connecting rank ", environment.rank, " of ",
                                  environment.world_size);
  if (!environment.master_addr.empty()) {
    absl::StrAppend(&what, " at ", environment.master_addr, ":",
                    environment.master_port);
  }
  return Annotate(Dispatch(environment, options), what);
}

}  // namespace fsdp::comm
