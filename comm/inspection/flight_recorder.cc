#include "comm/inspection/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "base/check.h"

namespace fsdp::comm {
namespace {

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free, "processes can share no locks");

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr auto kRelaxed = std::memory_order_relaxed;

// A text as words. One that is too long loses its middle.
template <int kBytes>
struct TextWords {
  static constexpr int kWords = kBytes / 8;

  // Returns how many bytes are stored.
  uint64_t Set(absl::string_view text) {
    constexpr size_t kCapacity = kBytes;
    std::array<char, kCapacity> bytes;
    const size_t size = std::min(text.size(), kCapacity);
    const size_t tail = text.size() > kCapacity ? kCapacity / 2 : 0;
    text.copy(bytes.data(), size - tail);
    if (tail > 0) {
      text.copy(bytes.data() + size - tail, tail, text.size() - tail);
    }
    for (size_t i = 0; i * 8 < size; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i * 8,
                  std::min<size_t>(8, size - i * 8));
      words[i].store(word, kRelease);
    }
    return size;
  }

  std::string Get(uint64_t size) const {
    std::array<char, kBytes> bytes;
    for (int i = 0; i < kWords; ++i) {
      const uint64_t word = words[i].load(kAcquire);
      std::memcpy(bytes.data() + ptrdiff_t{i} * 8, &word, 8);
    }
    std::string text(bytes.data(), std::min<uint64_t>(size, kBytes));
    // Replaces control characters, since a reader may print the text.
    std::replace_if(
        text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, '?');
    return text;
  }

  Word words[kWords];
};

// An operation, or a note: the Phase or StoreWait is the kind, its beginning is
// started_ns, the bytes in pools are `bytes`, and its text is the label.
//
// `version` is odd while somebody writes what follows it. All words are stored
// with kRelease and loaded with kAcquire, which keeps them between the two
// looks at the version.
struct Slot {
  Word version;  // (ticket << 1) | writing; a note has no ticket
  Word meta;     // see Meta
  Word number;
  Word call;
  Word bytes;
  Word started_ns;
  Word waited_ns;
  Word ended_ns;
  TextWords<FlightRecorder::kLabelBytes> label;
};
static_assert(sizeof(Slot) == 128, "two cache lines");

struct Group {
  Word id;  // 0: free
  Word calls;
};

template <int kSlots>
struct Block {
  Slot& slot(uint64_t ticket) { return slots[ticket % kSlots]; }
  const Slot& slot(uint64_t ticket) const { return slots[ticket % kSlots]; }

  Word tickets;  // handed out; the first is 1
  Word claimed;
  Word pid;
  Word taken_ns;  // of a message
  alignas(64) Slot phase;
  alignas(64) Slot wait;
  alignas(64) Group groups[FlightRecorder::kGroups];
  alignas(64) Slot slots[kSlots];
};
using Memory = Block<FlightRecorder::kOperations>;
using Message = Block<FlightRecorder::kSent>;

struct Meta {
  uint64_t kind;
  uint64_t state;
  uint64_t dtype;
  uint64_t label_size;
  uint64_t group;
};

uint64_t Pack(const Meta& meta) {
  return meta.kind | meta.state << 8 | meta.dtype << 16 |
         meta.label_size << 24 | meta.group << 32;
}

Meta Unpack(uint64_t word) {
  return {word & 0xff, word >> 8 & 0xff, word >> 16 & 0xff, word >> 24 & 0xff,
          word >> 32};
}

Memory& BlockAt(char* memory) { return *reinterpret_cast<Memory*>(memory); }
const Memory& BlockAt(const char* memory) {
  return *reinterpret_cast<const Memory*>(memory);
}

void SetState(Slot& slot, OperationState state) {
  Meta meta = Unpack(slot.meta.load(kRelaxed));
  meta.state = static_cast<uint64_t>(state);
  slot.meta.store(Pack(meta), kRelease);
}

// Writes the beginning of an operation; returns whether the slot was free.
bool Begin(Slot& slot, uint64_t ticket, const FlightRecorder::Begun& operation,
           uint64_t call, int64_t now_ns) {
  uint64_t before = slot.version.load(kRelaxed);
  if (before % 2 != 0 || before >= ticket << 1 ||
      !slot.version.compare_exchange_strong(before, ticket << 1 | 1,
                                            kAcquire)) {
    return false;
  }
  const uint64_t label_size = slot.label.Set(operation.label);
  slot.meta.store(Pack({static_cast<uint64_t>(operation.kind),
                        static_cast<uint64_t>(OperationState::kStarting),
                        static_cast<uint8_t>(operation.dtype), label_size,
                        static_cast<uint32_t>(operation.group)}),
                  kRelease);
  slot.number.store(static_cast<uint64_t>(int64_t{-1}), kRelease);
  slot.call.store(call, kRelease);
  slot.bytes.store(static_cast<uint64_t>(operation.bytes), kRelease);
  slot.started_ns.store(static_cast<uint64_t>(now_ns), kRelease);
  slot.waited_ns.store(0, kRelease);
  slot.ended_ns.store(0, kRelease);
  slot.version.store(ticket << 1, kRelease);
  return true;
}

// Gives the operation a state, and stores `value` in a word of its slot, unless
// that has gone on to a later one.
void Change(char* memory, uint64_t ticket, OperationState state,
            Word Slot::*word, int64_t value) {
  Slot& slot = BlockAt(memory).slot(ticket);
  uint64_t version = ticket << 1;
  if (ticket == 0 ||
      !slot.version.compare_exchange_strong(version, version | 1, kAcquire)) {
    return;
  }
  (slot.*word).store(static_cast<uint64_t>(value), kRelease);
  SetState(slot, state);
  slot.version.store(ticket << 1, kRelease);
}

// Returns what a peer has written, or the last value if that is none.
template <typename Enum>
Enum EnumOf(uint64_t value, int count) {
  return static_cast<Enum>(std::min<uint64_t>(value, count - 1));
}

OperationRecord Copy(const Slot& slot, uint64_t ticket) {
  const Meta meta = Unpack(slot.meta.load(kAcquire));
  OperationRecord record;
  record.ticket = ticket;
  record.kind = EnumOf<OperationKind>(meta.kind, kNumOperationKinds);
  record.state = EnumOf<OperationState>(meta.state, kNumOperationStates);
  record.dtype = static_cast<int8_t>(meta.dtype);
  if (meta.group < FlightRecorder::kGroups) {
    record.group = static_cast<int>(meta.group);
  }
  record.number = static_cast<int64_t>(slot.number.load(kAcquire));
  record.call = slot.call.load(kAcquire);
  record.bytes = static_cast<int64_t>(slot.bytes.load(kAcquire));
  record.started_ns = static_cast<int64_t>(slot.started_ns.load(kAcquire));
  record.waited_ns = static_cast<int64_t>(slot.waited_ns.load(kAcquire));
  record.ended_ns = static_cast<int64_t>(slot.ended_ns.load(kAcquire));
  record.label = slot.label.Get(meta.label_size);
  return record;
}

// The number of looks at something that is being written.
constexpr int kLooks = 100;

// Returns nullopt if the slot has gone on to a later operation than `ticket`,
// if that is given, or does not come to rest: a process may end in the middle
// of a write.
std::optional<OperationRecord> ReadSlot(
    const Slot& slot, std::optional<uint64_t> ticket = std::nullopt) {
  for (int look = 0; look < kLooks; ++look) {
    const uint64_t before = slot.version.load(kAcquire);
    if (ticket && before >> 1 != *ticket) return std::nullopt;
    OperationRecord record = Copy(slot, before >> 1);
    if (before % 2 == 0 && slot.version.load(kAcquire) == before) return record;
    std::this_thread::yield();
  }
  return std::nullopt;
}

// Returns the kind of a note.
static_assert(kNumPhases <= kNumOperationKinds &&
                  kNumStoreWaits <= kNumOperationKinds,
              "the record of an operation holds every kind of a note");
template <typename Enum>
Enum NoteOf(const OperationRecord& note, int count) {
  return EnumOf<Enum>(static_cast<uint64_t>(note.kind), count);
}

// Writes the note; returns its version, or 0 if somebody else writes it.
uint64_t Write(Slot& note, uint64_t kind, absl::string_view text,
               int64_t now_ns, int64_t pool_bytes) {
  uint64_t version = note.version.load(kRelaxed);
  if (version % 2 != 0 ||
      !note.version.compare_exchange_strong(version, version | 1, kAcquire)) {
    return 0;
  }
  Meta meta = {};
  meta.kind = kind;
  meta.label_size = note.label.Set(text);
  note.meta.store(Pack(meta), kRelease);
  note.started_ns.store(static_cast<uint64_t>(now_ns), kRelease);
  if (pool_bytes >= 0) {
    note.bytes.store(static_cast<uint64_t>(pool_bytes), kRelease);
  }
  note.version.store(version + 2, kRelease);
  return version + 2;
}

template <int kSlots>
RankRecord ReadBlock(const Block<kSlots>& block) {
  RankRecord record;
  record.pid = static_cast<int64_t>(block.pid.load(kAcquire));
  OperationRecord phase = ReadSlot(block.phase).value_or(OperationRecord());
  record.phase = NoteOf<Phase>(phase, kNumPhases);
  record.phase_ns = phase.started_ns;
  record.pool_bytes = phase.bytes;
  record.unit = std::move(phase.label);
  OperationRecord wait = ReadSlot(block.wait).value_or(OperationRecord());
  record.wait = NoteOf<StoreWait>(wait, kNumStoreWaits);
  record.wait_ns = wait.started_ns;
  record.wait_what = std::move(wait.label);
  const uint64_t last = block.tickets.load(kAcquire);
  record.num_operations = last;
  const uint64_t first = last > kSlots ? last - kSlots : 0;
  for (uint64_t ticket = first + 1; ticket - first <= last - first; ++ticket) {
    auto operation = ReadSlot(block.slot(ticket), ticket);
    if (operation) record.operations.push_back(*std::move(operation));
  }
  for (const Group& group : block.groups) {
    const uint64_t id = group.id.load(kAcquire);
    if (id == 0) break;
    record.groups.push_back({id, group.calls.load(kAcquire)});
  }
  return record;
}

std::shared_ptr<char> OwnMemory() {
  const auto bytes = static_cast<size_t>(FlightRecorder::Bytes());
  void* memory = ::operator new (bytes, std::align_val_t{64});
  std::memset(memory, 0, bytes);
  return {static_cast<char*>(memory),
          [](char* begin) { ::operator delete (begin, std::align_val_t{64}); }};
}

}  // namespace

FlightRecorder::FlightRecorder(std::shared_ptr<char> memory)
    : memory_(std::move(memory)) {
  FSDP_CHECK(reinterpret_cast<uintptr_t>(memory_.get()) % alignof(Memory) == 0);
  BlockAt(memory_.get()).pid = static_cast<uint64_t>(getpid());
}

FlightRecorder::FlightRecorder() : FlightRecorder(OwnMemory()) {}

int64_t FlightRecorder::Bytes() { return sizeof(Memory); }

int FlightRecorder::AddGroup(uint64_t id) {
  Memory& block = BlockAt(memory_.get());
  for (int i = 0; i < kGroups; ++i) {
    uint64_t none = 0;
    if (block.groups[i].id.compare_exchange_strong(none, id)) return i;
  }
  return -1;
}

FlightRecorder::Ticket FlightRecorder::Begin(const Begun& operation,
                                             int64_t now_ns) {
  Memory& block = BlockAt(memory_.get());
  const uint64_t call =
      operation.group < 0
          ? 0
          : block.groups[operation.group].calls.fetch_add(1, kRelaxed);
  const uint64_t ticket = block.tickets.fetch_add(1, kRelaxed) + 1;
  const bool begun =
      comm::Begin(block.slot(ticket), ticket, operation, call, now_ns);
  return {begun ? ticket : 0};
}

void FlightRecorder::Started(Ticket ticket, int64_t number) {
  Change(memory_.get(), ticket.value, OperationState::kStarted, &Slot::number,
         number);
}

void FlightRecorder::Waits(Ticket ticket, int64_t now_ns) {
  Change(memory_.get(), ticket.value, OperationState::kWaiting,
         &Slot::waited_ns, now_ns);
}

void FlightRecorder::Ends(Ticket ticket, OperationState state, int64_t now_ns) {
  Change(memory_.get(), ticket.value, state, &Slot::ended_ns, now_ns);
}

void FlightRecorder::Note(Phase phase, absl::string_view unit,
                          int64_t pool_bytes, int64_t now_ns) {
  Write(BlockAt(memory_.get()).phase, static_cast<uint64_t>(phase), unit,
        now_ns, pool_bytes);
}

uint64_t FlightRecorder::BeginWait(StoreWait wait, absl::string_view what,
                                   int64_t now_ns) {
  return Write(BlockAt(memory_.get()).wait, static_cast<uint64_t>(wait), what,
               now_ns, /*pool_bytes=*/-1);
}

// Does nothing if another wait has begun since: that one is to be shown.
void FlightRecorder::EndWait(uint64_t wait) {
  Slot& note = BlockAt(memory_.get()).wait;
  uint64_t version = wait;
  if (wait == 0 ||
      !note.version.compare_exchange_strong(version, version | 1, kAcquire)) {
    return;
  }
  note.meta.store(0, kRelease);
  note.started_ns.store(0, kRelease);
  note.version.store(version + 2, kRelease);
}

RankRecord FlightRecorder::Read(int64_t now_ns) const {
  return Read(memory_.get(), now_ns);
}

RankRecord FlightRecorder::Read(const char* memory, int64_t now_ns) {
  RankRecord record = ReadBlock(BlockAt(memory));
  record.taken_ns = now_ns;
  return record;
}

std::string FlightRecorder::Encode(const RankRecord& record) {
  Message message = {};
  message.tickets = record.num_operations;
  message.pid = static_cast<uint64_t>(record.pid);
  message.taken_ns = static_cast<uint64_t>(record.taken_ns);
  Write(message.phase, static_cast<uint64_t>(record.phase), record.unit,
        record.phase_ns, record.pool_bytes);
  Write(message.wait, static_cast<uint64_t>(record.wait), record.wait_what,
        record.wait_ns, /*pool_bytes=*/-1);
  for (size_t i = 0; i < record.groups.size() && i < kGroups; ++i) {
    message.groups[i].id = record.groups[i].id;
    message.groups[i].calls = record.groups[i].calls;
  }
  for (const OperationRecord& sent : record.operations) {
    // A later one takes the place of an earlier one.
    Slot& slot = message.slot(sent.ticket);
    comm::Begin(slot, sent.ticket,
                {sent.kind, sent.dtype, sent.group, sent.bytes, sent.label},
                sent.call, sent.started_ns);
    slot.number = static_cast<uint64_t>(sent.number);
    slot.waited_ns = static_cast<uint64_t>(sent.waited_ns);
    slot.ended_ns = static_cast<uint64_t>(sent.ended_ns);
    SetState(slot, sent.state);
  }
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

std::optional<RankRecord> FlightRecorder::Decode(absl::string_view message) {
  if (message.size() != sizeof(Message)) return std::nullopt;
  alignas(Message) std::array<char, sizeof(Message)> copy;
  message.copy(copy.data(), copy.size());
  const auto& block = *reinterpret_cast<const Message*>(copy.data());
  RankRecord record = ReadBlock(block);
  record.taken_ns = static_cast<int64_t>(block.taken_ns.load());
  return record;
}

bool FlightRecorder::Claim(char* memory) {
  return BlockAt(memory).claimed.exchange(1) == 0;
}

}  // namespace fsdp::comm
