#include "comm/inspection/peer_records.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
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
      EncodeRecord(recorder_->Read(absl::ToUnixNanos(absl::Now())));
  const auto publish = [mail = mail_, key = Key(rank_), bytes] {
    TorchToStatus("show what this rank does", [&] {
      mail->store->set(key, std::vector<uint8_t>(bytes.begin(), bytes.end()));
    }).IgnoreError();
  };
  if (!CallInTime(publish, AtLeastPatience(deadline))) mail_ = nullptr;
}

void PeerRecords::Fetch(absl::Time fresh, absl::Time deadline) {
  std::vector<int> wanted;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer == rank_ || peers_[peer].segment != nullptr) continue;
    const auto& published = peers_[peer].published;
    if (published && published->taken_ns >= absl::ToUnixNanos(fresh)) continue;
    wanted.push_back(peer);
  }
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
    if (auto record = DecodeRecord(bytes)) peers_[peer].published = *record;
  }
  mail_->fetched.clear();
}

std::vector<SeenRank> PeerRecords::Read(absl::Time fresh, absl::Time deadline) {
  const auto is_fresh = [&](const Peer& peer) {
    return peer.segment != nullptr ||
           (peer.published &&
            peer.published->taken_ns >= absl::ToUnixNanos(fresh));
  };
  const auto all_fresh = [&] {
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (peer != rank_ && !is_fresh(peers_[peer])) return false;
    }
    return true;
  };
  while (mail_ != nullptr && !all_fresh()) {
    Fetch(fresh, deadline);
    if (absl::Now() + kPollInterval >= deadline) break;
    if (!all_fresh()) absl::SleepFor(kPollInterval);
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

namespace {

// The number of the format, which changes with what follows it.
constexpr uint32_t kFormat = 0x46445232;

template <typename T>
void Put(std::string& bytes, T value) {
  static_assert(std::is_integral_v<T>);
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  bytes.append(raw, sizeof(T));
}

void PutText(std::string& bytes, absl::string_view text) {
  text = text.substr(0, FlightRecorder::kLabelBytes);
  Put(bytes, static_cast<uint8_t>(text.size()));
  bytes.append(text.data(), text.size());
}

// Takes values off the front; failed() once one was missing or invalid.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Take() {
    T value = 0;
    if (rest_.size() < sizeof(T)) {
      failed_ = true;
      return value;
    }
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_.remove_prefix(sizeof(T));
    return value;
  }

  int TakeBelow(int count) {
    const auto value = Take<uint8_t>();
    if (value >= count) failed_ = true;
    return failed_ ? 0 : value;
  }

  std::string TakeText() {
    const auto size = Take<uint8_t>();
    if (size > FlightRecorder::kLabelBytes || size > rest_.size()) {
      failed_ = true;
      return "";
    }
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    std::replace_if(
        text.begin(), text.end(), [](char c) { return c >= 0 && c < ' '; },
        '?');
    return text;
  }

  bool failed() const { return failed_; }
  bool at_end() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
  bool failed_ = false;
};

void PutOperation(std::string& bytes, const OperationRecord& operation) {
  Put(bytes, operation.ticket);
  Put(bytes, static_cast<uint8_t>(operation.kind));
  Put(bytes, static_cast<uint8_t>(operation.state));
  Put(bytes, operation.dtype);
  Put(bytes, static_cast<int8_t>(operation.group));
  Put(bytes, operation.call);
  Put(bytes, operation.number);
  Put(bytes, operation.bytes);
  Put(bytes, operation.started_ns);
  Put(bytes, operation.waited_ns);
  Put(bytes, operation.ended_ns);
  PutText(bytes, operation.label);
}

OperationRecord TakeOperation(Reader& reader) {
  OperationRecord operation;
  operation.ticket = reader.Take<uint64_t>();
  operation.kind =
      static_cast<OperationKind>(reader.TakeBelow(kNumOperationKinds));
  operation.state =
      static_cast<OperationState>(reader.TakeBelow(kNumOperationStates));
  operation.dtype = reader.Take<int8_t>();
  operation.group = std::max<int>(-1, reader.Take<int8_t>());
  operation.call = reader.Take<uint64_t>();
  operation.number = reader.Take<int64_t>();
  operation.bytes = reader.Take<int64_t>();
  operation.started_ns = reader.Take<int64_t>();
  operation.waited_ns = reader.Take<int64_t>();
  operation.ended_ns = reader.Take<int64_t>();
  operation.label = reader.TakeText();
  return operation;
}

}  // namespace

std::string EncodeRecord(const RankRecord& record) {
  std::string bytes;
  Put(bytes, kFormat);
  Put(bytes, record.pid);
  Put(bytes, record.taken_ns);
  Put(bytes, static_cast<uint8_t>(record.phase));
  PutText(bytes, record.unit);
  Put(bytes, record.phase_ns);
  Put(bytes, record.pool_bytes);
  Put(bytes, static_cast<uint8_t>(record.wait));
  PutText(bytes, record.wait_what);
  Put(bytes, record.wait_ns);
  Put(bytes, record.num_operations);
  const size_t groups =
      std::min<size_t>(record.groups.size(), FlightRecorder::kGroups);
  Put(bytes, static_cast<uint8_t>(groups));
  for (size_t i = 0; i < groups; ++i) {
    Put(bytes, record.groups[i].id);
    Put(bytes, record.groups[i].calls);
  }
  const size_t count =
      std::min<size_t>(record.operations.size(), kSentOperations);
  Put(bytes, static_cast<uint8_t>(count));
  for (size_t i = record.operations.size() - count;
       i < record.operations.size(); ++i) {
    PutOperation(bytes, record.operations[i]);
  }
  return bytes;
}

std::optional<RankRecord> DecodeRecord(absl::string_view bytes) {
  if (bytes.size() > kMaxEncodedBytes) return std::nullopt;
  Reader reader(bytes);
  if (reader.Take<uint32_t>() != kFormat) return std::nullopt;
  RankRecord record;
  record.pid = reader.Take<int64_t>();
  record.taken_ns = reader.Take<int64_t>();
  record.phase = static_cast<Phase>(reader.TakeBelow(kNumPhases));
  record.unit = reader.TakeText();
  record.phase_ns = reader.Take<int64_t>();
  record.pool_bytes = reader.Take<int64_t>();
  record.wait = static_cast<StoreWait>(reader.TakeBelow(kNumStoreWaits));
  record.wait_what = reader.TakeText();
  record.wait_ns = reader.Take<int64_t>();
  record.num_operations = reader.Take<uint64_t>();
  const int groups = reader.TakeBelow(FlightRecorder::kGroups + 1);
  for (int i = 0; i < groups; ++i) {
    const auto id = reader.Take<uint64_t>();
    record.groups.push_back({id, reader.Take<uint64_t>()});
  }
  const int count = reader.TakeBelow(kSentOperations + 1);
  for (int i = 0; i < count; ++i) {
    record.operations.push_back(TakeOperation(reader));
  }
  if (reader.failed() || !reader.at_end()) return std::nullopt;
  return record;
}

}  // namespace fsdp::comm
