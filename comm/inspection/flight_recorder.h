// Records the last operations of one rank, in memory that others may read while
// it writes.
#ifndef COMM_INSPECTION_FLIGHT_RECORDER_H_
#define COMM_INSPECTION_FLIGHT_RECORDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {

// The operations in which ranks wait for one another: the kinds of Collective,
// in their order, and others.
enum class OperationKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kBroadcast,
  kSplit,
  kAllocate,
  kFence,
};
inline constexpr int kNumOperationKinds =
    static_cast<int>(OperationKind::kFence) + 1;

enum class OperationState : uint8_t {
  kStarting,  // the call has not returned
  kStarted,   // nobody waits yet
  kWaiting,   // the host waits for it
  kOnDevice,  // a device runs it, and does not say when it is done
  kDone,
  kFailed,
  kDropped,  // nobody has waited for it or will
};
inline constexpr int kNumOperationStates =
    static_cast<int>(OperationState::kDropped) + 1;

// One operation. Times are nanoseconds since 1970; 0: not yet.
struct OperationRecord {
  uint64_t ticket = 0;  // counts this rank's operations
  OperationKind kind = OperationKind::kAllGather;
  OperationState state = OperationState::kStarting;
  int8_t dtype = -1;       // at::ScalarType; -1: none
  int group = -1;          // index into RankRecord::groups; -1: unknown
  uint64_t call = 0;       // counts the group's calls from 0
  int64_t number = -1;     // Work::number(); -1: `call` names it
  int64_t bytes = 0;       // of the whole tensor
  int64_t started_ns = 0;  // when it was called
  int64_t waited_ns = 0;   // when the host began to wait
  int64_t ended_ns = 0;
  std::string label;  // "blocks.2"

  // True while it is being started or waited for; and since when.
  bool is_open() const {
    return state == OperationState::kStarting ||
           state == OperationState::kWaiting;
  }
  int64_t open_since_ns() const {
    return state == OperationState::kWaiting ? waited_ns : started_ns;
  }
};

// A group of a rank. All its ranks give it the same id.
struct GroupRecord {
  uint64_t id = 0;
  uint64_t calls = 0;  // made so far
};

struct RankRecord {
  int64_t pid = 0;
  int64_t taken_ns = 0;  // when this was read
  Phase phase = Phase::kUnknown;
  std::string unit;        // "" where the phase has none
  int64_t phase_ns = 0;    // its beginning
  int64_t pool_bytes = 0;  // in the rank's memory pools
  StoreWait wait = StoreWait::kNothing;
  std::string wait_what;        // "" where it waits for no store
  int64_t wait_ns = 0;          // beginning of the wait
  uint64_t num_operations = 0;  // begun so far
  std::vector<GroupRecord> groups;
  std::vector<OperationRecord> operations;  // the last ones, oldest first
};

// Writes the record of one rank. Thread-safe; only Read(), Encode() and
// Decode() wait or allocate. If two threads write to one place at the same
// time, one write is lost.
class FlightRecorder {
 public:
  static constexpr int kOperations = 100;  // kept
  static constexpr int kSent = 16;         // in a message, the last ones
  static constexpr int kGroups = 32;       // told apart
  static constexpr int kLabelBytes = 64;   // longer ones lose their middle

  // Names an operation as long as it is kept.
  struct Ticket {
    uint64_t value = 0;  // 0: not recorded
  };

  struct Begun {
    OperationKind kind;
    int8_t dtype = -1;
    int group = -1;
    int64_t bytes = 0;
    absl::string_view label = {};
  };

  // Records in `memory`, of which it keeps a reference: Bytes() that are zero
  // and aligned to 64.
  explicit FlightRecorder(std::shared_ptr<char> memory);
  // Records in memory of its own.
  FlightRecorder();
  static int64_t Bytes();

  // Counts a group's calls. Returns its index, or -1 if there are too many.
  int AddGroup(uint64_t id);

  Ticket Begin(const Begun& operation, int64_t now_ns);
  // The call has returned; `number` is that of OperationRecord.
  void Started(Ticket ticket, int64_t number);
  void Waits(Ticket ticket, int64_t now_ns);
  // `state` is one of those after kWaiting.
  void Ends(Ticket ticket, OperationState state, int64_t now_ns);

  // These do what RankActivity says. BeginWait() returns 0 if the wait is not
  // recorded.
  void Note(Phase phase, absl::string_view unit, int64_t pool_bytes,
            int64_t now_ns);
  uint64_t BeginWait(StoreWait wait, absl::string_view what, int64_t now_ns);
  void EndWait(uint64_t wait);

  RankRecord Read(int64_t now_ns) const;

  // Reads the record of another rank from `memory`: Bytes() that may change at
  // any time and that a faulty process may have written.
  static RankRecord Read(const char* memory, int64_t now_ns);

  // Makes a message of a record, for ranks that cannot read the memory.
  static std::string Encode(const RankRecord& record);
  // Does the reverse, within the bounds of Read(). Returns nullopt for bytes of
  // another length.
  static std::optional<RankRecord> Decode(absl::string_view message);

  // Returns true for the first call for that memory, in any process.
  static bool Claim(char* memory);
  char* memory() const { return memory_.get(); }

 private:
  const std::shared_ptr<char> memory_;
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_FLIGHT_RECORDER_H_
