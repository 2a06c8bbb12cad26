#include "comm/inspection/peer_records.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/group/connect_together.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(20);
// A record of another host is called old from this age on.
constexpr absl::Duration kOld = absl::Seconds(1);

// A store is given at least this long before it is taken not to answer.
constexpr absl::Duration kPatience = absl::Milliseconds(500);

absl::Time AtLeastPatience(absl::Time deadline) {
  return std::max(deadline, absl::Now() + kPatience);
}

std::string Key(int rank) { return absl::StrCat("record/", rank); }

// Returns "HOST\n" and then the bytes of the address of the rank's segment.
std::string Introduction(const std::string& host,
                         const SegmentAddress& address) {
  std::string bytes(sizeof(address), '\0');
  std::memcpy(bytes.data(), &address, sizeof(address));
  return absl::StrCat(host, "\n", bytes);
}

std::optional<SegmentAddress> AddressIn(absl::string_view introduction,
                                        const std::string& host) {
  SegmentAddress address;
  if (!absl::ConsumePrefix(&introduction, host) ||
      !absl::ConsumePrefix(&introduction, "\n") ||
      introduction.size() != sizeof(address)) {
    return std::nullopt;
  }
  std::memcpy(&address, introduction.data(), sizeof(address));
  return address;
}

}  // namespace

// The store, and what a call that is left behind in it may still use.
struct PeerRecords::Mail {
  c10::intrusive_ptr<c10d::Store> store;
  absl::Mutex mutex;
  std::map<int, std::string> fetched ABSL_GUARDED_BY(mutex);
};

PeerRecords::PeerRecords(int rank, int world_size,
                         std::shared_ptr<SharedSegment> own)
    : rank_(rank),
      own_(std::move(own)),
      recorder_(own_ == nullptr
                    ? std::make_shared<FlightRecorder>()
                    : std::make_shared<FlightRecorder>(
                          std::shared_ptr<char>(own_, own_->data()))),
      peers_(world_size) {}

absl::StatusOr<std::unique_ptr<PeerRecords>> PeerRecords::Connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const std::string& host, absl::Time deadline) {
  auto own = SharedSegment::Create(FlightRecorder::Bytes());
  const SegmentAddress address =
      own.ok() ? (*own)->address() : SegmentAddress();
  FSDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> introductions,
      ExchangeByStore(store, "inspection", rank, RankNames(world_size),
                      Introduction(host, address), deadline));
  std::unique_ptr<PeerRecords> records(
      new PeerRecords(rank, world_size, own.ok() ? *std::move(own) : nullptr));
  bool any_elsewhere = records->own_ == nullptr;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
    records->Open(peer, introductions[peer], host);
    any_elsewhere |= records->peers_[peer].segment == nullptr;
  }
  if (any_elsewhere) {
    records->mail_ = std::make_shared<Mail>();
    FSDP_RETURN_IF_ERROR(
        TorchToStatus("open one more connection to the store",
                      [&] { records->mail_->store = store->clone(); }));
  }
  return records;
}

void PeerRecords::Open(int peer, const std::string& introduction,
                       const std::string& host) {
  const auto address = AddressIn(introduction, host);
  if (!address || address->bytes < FlightRecorder::Bytes()) return;
  auto segment = SharedSegment::Open(*address);
  if (!segment.ok()) return;
  peers_[peer].segment = *std::move(segment);
  peers_[peer].process = std::make_unique<PeerProcess>(address->pid);
}

void PeerRecords::Seal() {
  if (own_ != nullptr) own_->Seal();
  for (Peer& peer : peers_) {
    if (peer.segment != nullptr) peer.segment->Seal();
  }
}

void PeerRecords::Publish(absl::Time deadline) {
  if (mail_ == nullptr) return;
  const std::string bytes =
      FlightRecorder::Encode(recorder_->Read(absl::GetCurrentTimeNanos()));
  const auto publish = [mail = mail_, key = Key(rank_), bytes] {
    TorchToStatus("show what this rank does", [&] {
      mail->store->set(key, std::vector<uint8_t>(bytes.begin(), bytes.end()));
    }).IgnoreError();
  };
  if (!CallInTime(publish, AtLeastPatience(deadline))) mail_ = nullptr;
}

void PeerRecords::Fetch(const std::vector<int>& wanted, absl::Time deadline) {
  const auto fetch = [mail = mail_, wanted] {
    for (const int peer : wanted) {
      std::vector<uint8_t> bytes;
      const absl::Status status = TorchToStatus("look at another rank", [&] {
        if (!mail->store->check({Key(peer)})) return;
        bytes = mail->store->get(Key(peer));
      });
      if (!status.ok()) return;
      absl::MutexLock lock(&mail->mutex);
      mail->fetched[peer] = std::string(bytes.begin(), bytes.end());
    }
  };
  if (!CallInTime(fetch, AtLeastPatience(deadline))) {
    mail_ = nullptr;
    return;
  }
  absl::MutexLock lock(&mail_->mutex);
  for (const auto& [peer, bytes] : mail_->fetched) {
    auto record = FlightRecorder::Decode(bytes);
    if (record) peers_[peer].published = *std::move(record);
  }
  mail_->fetched.clear();
}

std::vector<SeenRank> PeerRecords::Read(absl::Time fresh, absl::Time deadline) {
  const auto stale = [&] {
    std::vector<int> ranks;
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (peer == rank_ || peers_[peer].segment != nullptr) continue;
      const auto& published = peers_[peer].published;
      if (published && published->taken_ns >= absl::ToUnixNanos(fresh))
        continue;
      ranks.push_back(peer);
    }
    return ranks;
  };
  std::vector<int> wanted = stale();
  while (mail_ != nullptr && !wanted.empty()) {
    Fetch(wanted, deadline);
    if (absl::Now() + kPollInterval >= deadline) break;
    wanted = stale();
    if (!wanted.empty()) absl::SleepFor(kPollInterval);
  }
  std::vector<SeenRank> seen = ReadHost();
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    const Peer& from = peers_[peer];
    if (peer == rank_ || from.segment != nullptr || !from.published) continue;
    seen[peer].record = from.published;
    const absl::Duration age =
        absl::Now() - absl::FromUnixNanos(from.published->taken_ns);
    if (age > kOld) {
      seen[peer].process = absl::StrCat("on another host, as it was ",
                                        absl::ToInt64Seconds(age), " s ago");
    }
  }
  return seen;
}

std::vector<SeenRank> PeerRecords::ReadHost() const {
  const int64_t now_ns = absl::ToUnixNanos(absl::Now());
  std::vector<SeenRank> seen(peers_.size());
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    const Peer& from = peers_[peer];
    if (peer == rank_) {
      seen[peer].record = recorder_->Read(now_ns);
    } else if (from.segment != nullptr) {
      seen[peer].record = FlightRecorder::Read(from.segment->data(), now_ns);
      seen[peer].process = from.process->Describe();
    }
  }
  return seen;
}

bool PeerRecords::ClaimForHost() const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_) return FlightRecorder::Claim(recorder_->memory());
    if (peers_[peer].segment != nullptr) {
      return FlightRecorder::Claim(peers_[peer].segment->data());
    }
  }
  return true;
}

}  // namespace fsdp::comm
