#include "comm/gloo/gloo_communicator.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/gloo/message_transport.h"
#include "comm/gloo/peer_collectives.h"
#include "comm/group/connect_together.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_queue.h"
#include "comm/split_members.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Extra time for the backend to say more about a missed deadline.
constexpr absl::Duration kSlack = absl::Seconds(1);

// The longest time that a failed wait stays for the worker to let go of the
// buffers. The worker is between two messages or adds up a chunk.
constexpr absl::Duration kLetGo = absl::Seconds(5);

// Runs operations one after the other on a thread of its own, so that all their
// steps overlap with the caller's work. Thread-safe.
class Group {
 public:
  // Runs an operation when it is its turn. Keeps its tensors alive.
  using Run =
      std::function<absl::Status(PeerCollectives&, PeerCollectives::Agree)>;
  using Operation = OperationQueue::Operation;

  // `transport` connects the ranks, which meet in `store`.
  static absl::StatusOr<std::shared_ptr<Group>> Create(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, RankNames names,
      std::unique_ptr<MessageTransport> transport,
      absl::Duration diagnosis_timeout) {
    std::shared_ptr<Group> group(new Group(
        rank, std::move(names), std::move(transport), diagnosis_timeout));
    FSDP_ASSIGN_OR_RETURN(
        group->reports_,
        ReportExchange::Create(store, rank, group->world_size()));
    FSDP_RETURN_IF_ERROR(group->calls_->Start());
    FSDP_RETURN_IF_ERROR(group->reports_->Start([raw = group.get()] {
      raw->Fail(Cause::kEcho, "another rank has failed");
    }));
    FSDP_RETURN_IF_ERROR(group->queue_.Start("for collectives"));
    return group;
  }

  ~Group() { Stop(); }

  int rank() const { return rank_; }
  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }

  // Queues an operation. Fails at once when the group has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Post(Call call, Run run) {
    std::string name;
    std::shared_ptr<Operation> operation;
    {
      // Operations are queued in the order of their numbers.
      absl::MutexLock lock(&mutex_);
      const int64_t sequence = next_sequence_++;
      name = Name(call, sequence);
      operation = queue_.Post(
          name, [this, call = std::move(call), sequence, run = std::move(run)] {
            return Execute(call, sequence, run);
          });
    }
    if (operation == nullptr) return ErrorOf(name);
    return operation;
  }

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline) {
    const auto give_up = [this] {
      Fail(Cause::kDeadline, "not done at the deadline");
    };
    if (queue_.Wait(operation, deadline, give_up, kLetGo)) {
      return absl::OkStatus();
    }
    return ErrorOf(operation.name);
  }

  // Fails the group, here and on the peers.
  void Abort(const absl::Status& reason) {
    Fail(Cause::kAbort, std::string(reason.message()));
  }

  // Fails operations that are not done, tells the peers that this rank has left
  // and ends the threads. Only the first call counts.
  void Stop() {
    const auto left = queue_.Finish();
    if (!left.has_value()) return;
    const RankReport farewell{Cause::kLeft, "", left->position};
    // Peers must be able to read it when the connections close.
    if (reports_ != nullptr) reports_->Leave(farewell);
    if (left->unfinished) Fail(Cause::kLeft, "this rank has left the group");
    queue_.Join();
    if (reports_ != nullptr) reports_->Stop();
    // Peers that still wait for this rank notice by the closed connections.
    calls_.reset();
    messages_.reset();
  }

 private:
  Group(int rank, RankNames names, std::unique_ptr<MessageTransport> transport,
        absl::Duration diagnosis_timeout)
      : rank_(rank),
        names_(std::move(names)),
        diagnosis_timeout_(diagnosis_timeout),
        messages_(std::make_unique<PeerMessages>(std::move(transport))),
        calls_(std::make_unique<CallExchange>(rank, names_, messages_.get())),
        collectives_(rank, names_.size(), messages_.get()) {}

  absl::Status Execute(const Call& call, int64_t sequence, const Run& run) {
    absl::Status status = calls_->Announce(sequence, call);
    if (status.ok()) {
      status = run(collectives_, [this] { return calls_->Agree(); });
    }
    if (absl::IsInvalidArgument(status)) {
      Fail(Cause::kMismatch, std::string(status.message()));
    } else if (!status.ok()) {
      Fail(Cause::kLost, std::string(status.message()));
    }
    return status;
  }

  void Fail(Cause cause, std::string text) {
    RankReport report{cause, std::move(text)};
    {
      absl::MutexLock lock(&mutex_);
      if (failure_) return;
      report.position = queue_.Cancel();
      failure_ = report;
      failed_at_ = absl::Now();
    }
    // Half of the time is for waiters to hear of a search that found nobody. A
    // rank that leaves has reported already.
    reports_->Report(report, diagnosis_timeout_ / 2);
    messages_->Abort();
  }

  // Returns the error of the operation `name`.
  absl::Status ErrorOf(absl::string_view name) {
    return Annotate(FindVerdict(),
                    absl::StrCat(name, " on ", names_.Place(rank_)));
  }

  absl::Status FindVerdict() {
    absl::Time until;
    {
      absl::MutexLock lock(&mutex_);
      if (verdict_) return *verdict_;
      until = failed_at_ + diagnosis_timeout_;
    }
    ReportExchange::Findings findings = reports_->Await(until);
    absl::MutexLock lock(&mutex_);
    if (!verdict_) {
      findings.reports[rank_] = failure_;
      verdict_ =
          Verdict(rank_, names_, findings.reports, findings.store_answers);
    }
    return *verdict_;
  }

  const int rank_;
  const RankNames names_;
  const absl::Duration diagnosis_timeout_;
  // Each of these uses those above it. Stop() ends calls_ and messages_.
  std::unique_ptr<ReportExchange> reports_;
  std::unique_ptr<PeerMessages> messages_;
  std::unique_ptr<CallExchange> calls_;  // used by operations only
  PeerCollectives collectives_;          // used by operations only

  absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<RankReport> failure_ ABSL_GUARDED_BY(mutex_);  // the first
  absl::Time failed_at_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its thread ends first.
  OperationQueue queue_;
};

using DevicePtr = std::shared_ptr<gloo::transport::Device>;

// The arguments with which Split() makes further groups.
struct Recipe {
  DevicePtr device;
  GlooOptions options;
};

char* Data(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

absl::Status Move(const CollectiveArgs& args, PeerCollectives& peers,
                  const PeerCollectives::Agree& agree) {
  char* const out = Data(args.out);
  const auto dtype = args.out.scalar_type();
  const int64_t numel = args.out.numel();
  const auto bytes = static_cast<int64_t>(args.counted().nbytes());
  const int64_t part = bytes / peers.world_size();
  switch (args.collective) {
    case Collective::kAllGather:
      return peers.Exchange(out, Data(args.in), /*stride=*/0, bytes, agree);
    case Collective::kReduceScatter:
      return peers.ReduceScatter(out, Data(args.in), dtype, numel, args.op,
                                 agree);
    case Collective::kAllToAll:
      return peers.Exchange(out, Data(args.in), part, part, agree);
    case Collective::kAllReduce:
      return peers.AllReduce(out, dtype, numel, args.op, agree);
    case Collective::kBroadcast:
      return peers.Broadcast(out, bytes, args.root, agree);
    case Collective::kSplit:
      break;
  }
  return absl::InternalError("a split moves no tensors");
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::shared_ptr<Group> group, StorePtr store, Recipe recipe)
      : group_(std::move(group)),
        store_(std::move(store)),
        recipe_(std::move(recipe)) {}
  ~GlooCommunicator() override {
    if (unwinds()) group_->Abort(EndedByException());
    group_->Stop();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  const RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override {
    return recipe_.options.timeout;
  }
  std::string ToString() const override {
    return absl::StrCat("gloo", recipe_.options.note, ", ", Place());
  }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes);
  }

  CreatedCommunicator Split(int color, int key) override;

  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    Call call = CallOf(args.collective, label, args.counted(), args.detail());
    if (!args.out.device().is_cpu()) {
      return absl::UnimplementedError(absl::StrCat(
          comm::ToString(call), " on ", Place(),
          ": gloo takes CPU tensors, not ", args.out.device().str()));
    }
    const auto run = [args](PeerCollectives& peers, const auto& agree) {
      return Move(args, peers, agree);
    };
    FSDP_ASSIGN_OR_RETURN(auto operation, group_->Post(std::move(call), run));
    return std::make_unique<GroupWork<Group>>(group_, std::move(operation),
                                              recipe_.options.timeout);
  }

 private:
  const std::shared_ptr<Group> group_;
  const StorePtr store_;
  const Recipe recipe_;
  int num_splits_ = 0;
};

CreatedCommunicator Create(const StorePtr& store, int rank, RankNames names,
                           Recipe recipe);

CreatedCommunicator GlooCommunicator::Split(int color, int key) {
  FSDP_RETURN_IF_ERROR(CheckColor(color));
  const auto requests =
      std::make_shared<std::vector<SplitRequest>>(world_size());
  (*requests)[rank()] = {color, key};
  FSDP_ASSIGN_OR_RETURN(
      auto operation,
      group_->Post(
          {Collective::kSplit, "the group", "", 0, ""},
          [requests, rank = rank()](PeerCollectives& peers, const auto& agree) {
            return peers.Exchange(
                reinterpret_cast<char*>(requests->data()),
                reinterpret_cast<const char*>(&(*requests)[rank]),
                /*stride=*/0, sizeof(SplitRequest), agree);
          }));
  FSDP_RETURN_IF_ERROR(
      group_->Wait(*operation, absl::Now() + recipe_.options.timeout));
  const std::vector<int> part = MembersByColor(*requests)[color];
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      absl::StrCat("split", num_splits_++, "/color", color), store_);
  Recipe recipe = recipe_;
  recipe.options.note.clear();  // it is about the whole group
  return Create(store, RankAmong(part, rank()), names().Part(part),
                std::move(recipe));
}

// Returns the store of this rank's next group on `store`: groups made one after
// the other must not see each other's keys.
StorePtr StoreOfNextGroup(const StorePtr& store, int rank) {
  const int64_t number = store->add(absl::StrCat("num_groups/", rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("group", number),
                                                store);
}

absl::Status Meet(const StorePtr& store, int rank, const RankNames& names,
                  absl::Time deadline) {
  const std::string own = absl::StrCat(names.size());
  const auto check = [&](int peer, absl::string_view size) {
    if (size == own) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the ranks disagree on the size of the group: ", own,
                     " here, ", names.Name(peer), " says ", size));
  };
  return ExchangeByStore(store, "sizes", rank, names, own, deadline, check)
      .status();
}

class ClosableGloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void CloseConnections() {
    for (const auto& context : contexts_) context->closeConnections();
  }
};

DevicePtr CreateDevice(const GlooOptions& options) {
  if (!options.hostname.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(options.hostname);
  }
  if (!options.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

// Returns the interface that has a numeric address, or "" if none has.
std::string InterfaceOf(const std::string& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size =
        family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST] = "";
    getnameinfo(one->ifa_addr, size, text, sizeof(text), nullptr, 0,
                NI_NUMERICHOST);
    if (address == text) name = one->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

// Returns where the others find this rank: "at 10.0.0.1 (interface eth0), ...".
std::string PlaceOf(const GlooOptions& options) {
  std::string place = "at the address of this host's name";
  if (!options.interface.empty()) {
    place = absl::StrCat("on interface ", options.interface);
  } else if (!options.hostname.empty()) {
    const std::string interface = InterfaceOf(options.hostname);
    place = absl::StrCat(
        "at ", options.hostname,
        interface.empty() ? "" : absl::StrCat(" (interface ", interface, ")"));
  }
  return absl::StrCat(
      place,
      ", which the others must reach: GLOO_SOCKET_IFNAME chooses an interface");
}

// Blocks for `timeout` at most if it can; if it takes longer, its thread is
// left behind.
absl::StatusOr<std::unique_ptr<MessageTransport>> ConnectGloo(
    const DevicePtr& device, const StorePtr& store, int rank,
    const RankNames& names, absl::Duration timeout) {
  c10::intrusive_ptr<ClosableGloo> gloo;
  FSDP_RETURN_IF_ERROR(C10dToStatus("it cannot connect", [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(
        absl::ToChronoMilliseconds(timeout));
    options->devices = {device};
    options->threads = 1;  // sends and receives need none
    gloo =
        c10::make_intrusive<ClosableGloo>(store, rank, names.size(), options);
  }));
  return C10dTransport(gloo, names,
                       [raw = gloo.get()] { raw->CloseConnections(); });
}

// Connects all ranks, or none.
absl::StatusOr<std::unique_ptr<MessageTransport>> ConnectTransport(
    const StorePtr& store, int rank, const RankNames& names,
    const Recipe& recipe, absl::Time deadline) {
  using TransportPtr = std::unique_ptr<MessageTransport>;
  const auto transport = std::make_shared<TransportPtr>();
  const auto connect = [=]() -> absl::Status {
    auto own =
        ConnectGloo(recipe.device, store, rank, names, deadline - absl::Now());
    if (!own.ok()) return Annotate(own.status(), PlaceOf(recipe.options));
    *transport = *std::move(own);
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(
      ConnectTogether(c10::make_intrusive<c10d::PrefixStore>("together", store),
                      rank, names, {deadline + kSlack}, connect));
  return std::move(*transport);
}

CreatedCommunicator Create(const StorePtr& store, int rank, RankNames names,
                           Recipe recipe) {
  const GlooOptions& options = recipe.options;
  const std::string what =
      absl::StrCat("create the gloo group on ", names.Place(rank));
  // Gloo writes to sockets whose other end may be closed, which by default ends
  // the program. (Python ignores that signal.) A write then fails with EPIPE,
  // which Gloo reports. The threads that start below inherit it, and nothing
  // changes for the rest of the process.
  const SignalBlock no_sigpipe(SIGPIPE);
  StorePtr group_store;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      what, [&] { group_store = StoreOfNextGroup(store, rank); }));
  const absl::Time deadline =
      absl::Now() + std::min(options.timeout, options.connect_timeout);
  FSDP_RETURN_IF_ERROR(
      Annotate(Meet(group_store, rank, names, deadline), what));
  auto transport = ConnectTransport(group_store, rank, names, recipe, deadline);
  if (!transport.ok()) return Annotate(transport.status(), what);
  auto group = Group::Create(group_store, rank, std::move(names),
                             *std::move(transport), options.diagnosis_timeout);
  if (!group.ok()) return Annotate(group.status(), what);
  recipe.options.connect_timeout = absl::InfiniteDuration();
  return std::make_unique<GlooCommunicator>(*std::move(group), group_store,
                                            std::move(recipe));
}

}  // namespace

CreatedCommunicator CreateGlooCommunicator(const StorePtr& store, int rank,
                                           int world_size,
                                           const GlooOptions& options) {
  FSDP_CHECK(store != nullptr && rank >= 0 && rank < world_size);
  FSDP_CHECK(options.hostname.empty() || options.interface.empty());
  FSDP_ASSIGN_OR_RETURN(RankNames names,
                        RankNames::Of(world_size, options.world_ranks));
  // Gloo leaks memory if it does not find the interface.
  if (!options.interface.empty() &&
      if_nametoindex(options.interface.c_str()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gloo on ", names.Name(rank),
        ": this host has no network interface named ", options.interface));
  }
  // The device starts a thread.
  const SignalBlock no_sigpipe(SIGPIPE);
  DevicePtr device;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      absl::StrCat(
          "open a Gloo device on ", names.Name(rank), " for ",
          options.hostname.empty() ? options.interface : options.hostname),
      [&] { device = CreateDevice(options); }));
  return Create(store, rank, std::move(names), {device, options});
}

}  // namespace fsdp::comm
