#include "comm/inspection/peer_records.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
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
      EncodeRecord(recorder_->Read(absl::ToUnixNanos(absl::Now())));
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
    if (auto record = DecodeRecord(bytes)) peers_[peer].published = *record;
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

namespace {

// The number of the format, which changes with what follows it.
constexpr uint32_t kFormat = 0x46445232;

// Appends values to bytes.
class Writer {
 public:
  template <typename T>
  void Number(T value) {
    static_assert(std::is_integral_v<T>);
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    bytes_.append(raw, sizeof(T));
  }
  template <typename T>
  void Below(int /*count*/, T value) {
    Number(static_cast<uint8_t>(value));
  }
  void Text(absl::string_view text) {
    text = text.substr(0, FlightRecorder::kLabelBytes);
    Number(static_cast<uint8_t>(text.size()));
    bytes_.append(text.data(), text.size());
  }

  std::string bytes() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Takes the same values off the front; failed() once one was missing or
// invalid.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  template <typename T>
  void Number(T& value) {
    value = 0;
    if (rest_.size() < sizeof(T)) {
      failed_ = true;
      return;
    }
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_.remove_prefix(sizeof(T));
  }
  template <typename T>
  void Below(int count, T& value) {
    uint8_t byte = 0;
    Number(byte);
    if (byte >= count) failed_ = true;
    value = static_cast<T>(failed_ ? 0 : byte);
  }
  void Text(std::string& text) {
    uint8_t size = 0;
    Number(size);
    text.clear();
    if (size > FlightRecorder::kLabelBytes || size > rest_.size()) {
      failed_ = true;
      return;
    }
    text.assign(rest_.data(), size);
    rest_.remove_prefix(size);
    std::replace_if(
        text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, '?');
  }

  bool failed() const { return failed_; }
  bool at_end() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
  bool failed_ = false;
};

// These pass the fields on in the order of the format. `Wire` is a Writer or a
// Reader.
template <typename Wire, typename Operation>
void PassOperation(Wire& wire, Operation& operation) {
  auto group = static_cast<int8_t>(operation.group);
  wire.Number(operation.ticket);
  wire.Below(kNumOperationKinds, operation.kind);
  wire.Below(kNumOperationStates, operation.state);
  wire.Number(operation.dtype);
  wire.Number(group);
  wire.Number(operation.call);
  wire.Number(operation.number);
  wire.Number(operation.bytes);
  wire.Number(operation.started_ns);
  wire.Number(operation.waited_ns);
  wire.Number(operation.ended_ns);
  wire.Text(operation.label);
  if constexpr (!std::is_const_v<Operation>) {
    operation.group = std::max<int>(-1, group);
  }
}

template <typename Wire, typename Record>
void PassHead(Wire& wire, Record& record) {
  wire.Number(record.pid);
  wire.Number(record.taken_ns);
  wire.Below(kNumPhases, record.phase);
  wire.Text(record.unit);
  wire.Number(record.phase_ns);
  wire.Number(record.pool_bytes);
  wire.Below(kNumStoreWaits, record.wait);
  wire.Text(record.wait_what);
  wire.Number(record.wait_ns);
  wire.Number(record.num_operations);
}

}  // namespace

std::string EncodeRecord(const RankRecord& record) {
  Writer writer;
  writer.Number(kFormat);
  PassHead(writer, record);
  const size_t groups =
      std::min<size_t>(record.groups.size(), FlightRecorder::kGroups);
  writer.Number(static_cast<uint8_t>(groups));
  for (size_t i = 0; i < groups; ++i) {
    writer.Number(record.groups[i].id);
    writer.Number(record.groups[i].calls);
  }
  const size_t count =
      std::min<size_t>(record.operations.size(), kSentOperations);
  writer.Number(static_cast<uint8_t>(count));
  for (size_t i = record.operations.size() - count;
       i < record.operations.size(); ++i) {
    PassOperation(writer, record.operations[i]);
  }
  return std::move(writer).bytes();
}

std::optional<RankRecord> DecodeRecord(absl::string_view bytes) {
  if (bytes.size() > kMaxEncodedBytes) return std::nullopt;
  Reader reader(bytes);
  uint32_t format = 0;
  reader.Number(format);
  if (format != kFormat) return std::nullopt;
  RankRecord record;
  PassHead(reader, record);
  int groups = 0;
  reader.Below(FlightRecorder::kGroups + 1, groups);
  record.groups.resize(groups);
  for (GroupRecord& group : record.groups) {
    reader.Number(group.id);
    reader.Number(group.calls);
  }
  int count = 0;
  reader.Below(kSentOperations + 1, count);
  record.operations.resize(count);
  for (OperationRecord& operation : record.operations) {
    PassOperation(reader, operation);
  }
  if (reader.failed() || !reader.at_end()) return std::nullopt;
  return record;
}

}  // namespace fsdp::comm
