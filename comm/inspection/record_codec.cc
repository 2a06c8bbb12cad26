#include "comm/inspection/record_codec.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace fsdp::comm {
namespace {

// Changes with what follows it.
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

// Takes values off the front; failed() once there was less, or something else.
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

  // A value below `count`.
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
