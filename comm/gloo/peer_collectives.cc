#include "comm/gloo/peer_collectives.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"
#include "comm/reduction/reduction.h"

namespace fsdp::comm {
namespace {

absl::Status Broken() { return absl::CancelledError("the group is broken"); }

// Truncates the text, so that the field always ends with a zero.
template <size_t kSize>
void CopyText(absl::string_view text, char (&field)[kSize]) {
  std::memcpy(field, text.data(), std::min(text.size(), kSize - 1));
}

// Accepts any bytes that a peer has sent.
template <size_t kSize>
std::string TextOf(const char (&field)[kSize]) {
  return std::string(field, strnlen(field, kSize));
}

constexpr int kAnnouncementTag = 0;
constexpr int kDataTag = 1;
constexpr int kResultTag = 2;  // of an all-reduce

// A reduction goes through its input in chunks: one is reduced while the next
// arrives. A chunk is large enough for the network and small enough for a
// cache, and with many ranks all chunks together stay below a limit.
constexpr int64_t kMaxChunkBytes = 1 << 20;
constexpr int64_t kMinChunkBytes = 1 << 16;
constexpr int64_t kMaxScratchBytes = 1 << 25;
constexpr int64_t kChunksInFlight = 2;

// Returns the same on all ranks.
int64_t ChunkBytes(int world_size) {
  return std::clamp(kMaxScratchBytes / (kChunksInFlight * world_size),
                    kMinChunkBytes, kMaxChunkBytes);
}

}  // namespace

PeerMessages::PeerMessages(std::unique_ptr<MessageTransport> transport)
    : transport_(std::move(transport)) {}

absl::Status PeerMessages::Send(int peer, int tag, const void* data,
                                int64_t bytes, Batch* batch) {
  if (bytes == 0) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckNotAborted());
  return Add(transport_->Send(peer, tag, data, bytes), batch);
}

absl::Status PeerMessages::Receive(int peer, int tag, void* data, int64_t bytes,
                                   Batch* batch) {
  if (bytes == 0) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckNotAborted());
  PostedMessage message = transport_->Receive(peer, tag, data, bytes);
  if (message.ok()) return Add(std::move(message), batch);
  batch->posted_.push_back(std::move(message));
  return absl::OkStatus();
}

absl::Status PeerMessages::Await(Batch* batch) {
  absl::Status status;
  for (const auto& message : batch->posted_) {
    status = message.ok() ? (*message)->Wait() : message.status();
    if (!status.ok()) break;
  }
  GiveUp(batch);
  absl::MutexLock lock(&mutex_);
  if (!status.ok() && aborted_) return Broken();
  if (!status.ok()) AbortLocked();
  return status;
}

void PeerMessages::Abort() {
  absl::MutexLock lock(&mutex_);
  AbortLocked();
}

absl::Status PeerMessages::CheckNotAborted() {
  absl::MutexLock lock(&mutex_);
  return aborted_ ? Broken() : absl::OkStatus();
}

absl::Status PeerMessages::Add(PostedMessage message, Batch* batch) {
  absl::MutexLock lock(&mutex_);
  if (!message.ok()) {
    if (aborted_) return Broken();
    AbortLocked();
    return message.status();
  }
  // Abort() may have run in between without seeing this message.
  if (aborted_) (*message)->Abort();
  in_flight_.push_back(*message);
  batch->posted_.push_back(std::move(message));
  return absl::OkStatus();
}

void PeerMessages::GiveUp(Batch* batch) {
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& message : batch->posted_) {
      if (!message.ok()) continue;
      const auto found =
          std::find(in_flight_.begin(), in_flight_.end(), *message);
      if (found != in_flight_.end()) in_flight_.erase(found);
    }
  }
  batch->posted_.clear();
}

void PeerMessages::AbortLocked() {
  if (aborted_) return;
  aborted_ = true;
  // Closing alone does not wake waiters on this side.
  for (const auto& message : in_flight_) message->Abort();
  in_flight_.clear();
  transport_->Close();
}

// The message that announces a call. Zeroed and without padding, it is compared
// byte by byte: all ranks run one program and have one byte order.
struct CallExchange::Announcement {
  int64_t sequence;
  int64_t count;
  uint64_t label_hash;  // of the whole label
  uint64_t collective;
  char dtype[16];
  char detail[16];
  char label[128];
};

CallExchange::CallExchange(int rank, RankNames names, PeerMessages* messages)
    : rank_(rank),
      names_(std::move(names)),
      messages_(messages),
      announcements_(names_.size(), Announcement{}),
      receives_(messages),
      sends_(messages) {
  static_assert(std::has_unique_object_representations_v<Announcement>);
}

CallExchange::~CallExchange() = default;

absl::Status CallExchange::Start() {
  for (int peer = 0; peer < names_.size(); ++peer) {
    if (peer == rank_) continue;
    FSDP_RETURN_IF_ERROR(messages_->Receive(peer, kAnnouncementTag,
                                            &announcements_[peer],
                                            sizeof(Announcement), &receives_));
  }
  return absl::OkStatus();
}

absl::Status CallExchange::Announce(int64_t sequence, const Call& call) {
  Announcement& own = announcements_[rank_];
  own = Announcement{};
  own.sequence = sequence;
  own.count = call.count;
  own.label_hash = Fnv1a(call.label);
  own.collective = static_cast<uint64_t>(call.collective);
  CopyText(call.dtype, own.dtype);
  CopyText(call.detail, own.detail);
  CopyText(call.label, own.label);
  for (int step = 1; step < names_.size(); ++step) {
    FSDP_RETURN_IF_ERROR(messages_->Send((rank_ + step) % names_.size(),
                                         kAnnouncementTag, &own, sizeof(own),
                                         &sends_));
  }
  return absl::OkStatus();
}

absl::Status CallExchange::Agree() {
  FSDP_RETURN_IF_ERROR(messages_->Await(&receives_));
  FSDP_RETURN_IF_ERROR(messages_->Await(&sends_));
  const Announcement& own = announcements_[rank_];
  const bool equal = std::all_of(
      announcements_.begin(), announcements_.end(), [&](const auto& other) {
        return std::memcmp(&own, &other, sizeof(own)) == 0;
      });
  if (equal) return Start();
  std::vector<std::string> calls;
  for (int peer = 0; peer < names_.size(); ++peer) {
    const Announcement& other = announcements_[peer];
    const Call call{static_cast<Collective>(other.collective),
                    TextOf(other.label), TextOf(other.dtype), other.count,
                    TextOf(other.detail)};
    calls.push_back(
        absl::StrCat(names_.Name(peer), " called ", ToString(call)));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the ranks' calls #", own.sequence,
                   " differ: ", absl::StrJoin(calls, "; ")));
}

PeerCollectives::PeerCollectives(int rank, int world_size,
                                 PeerMessages* messages)
    : rank_(rank), world_size_(world_size), messages_(messages) {}

std::vector<PeerCollectives::Part> PeerCollectives::Divide(int64_t size) const {
  const int64_t share = (size + world_size_ - 1) / world_size_;
  std::vector<Part> parts;
  for (int rank = 0; rank < world_size_; ++rank) {
    const int64_t begin = std::min(rank * share, size);
    parts.push_back({begin, std::min(share, size - begin)});
  }
  return parts;
}

std::vector<int> PeerCollectives::Peers() const {
  std::vector<int> peers;
  for (int step = 1; step < world_size_; ++step) {
    peers.push_back((rank_ + step) % world_size_);
  }
  return peers;
}

absl::Status PeerCollectives::Exchange(char* out, const char* in,
                                       int64_t stride, int64_t bytes,
                                       const Agree& agree) {
  Batch receives(messages_);
  Batch sends(messages_);
  for (int peer : Peers()) {
    FSDP_RETURN_IF_ERROR(messages_->Receive(peer, kDataTag, out + peer * bytes,
                                            bytes, &receives));
  }
  FSDP_RETURN_IF_ERROR(agree());
  for (int peer : Peers()) {
    FSDP_RETURN_IF_ERROR(
        messages_->Send(peer, kDataTag, in + peer * stride, bytes, &sends));
  }
  char* own = out + rank_ * bytes;
  const char* from = in + rank_ * stride;
  if (own != from && bytes > 0) std::memcpy(own, from, bytes);
  FSDP_RETURN_IF_ERROR(messages_->Await(&receives));
  return messages_->Await(&sends);
}

absl::Status PeerCollectives::ReduceScatter(char* out, const char* in,
                                            at::ScalarType dtype, int64_t count,
                                            ReduceOp op, const Agree& agree) {
  std::vector<Part> parts;
  parts.reserve(world_size_);
  for (int rank = 0; rank < world_size_; ++rank) {
    parts.push_back({rank * count, count});
  }
  return ReduceParts(parts, out, in, dtype, op, agree,
                     [](int64_t, int64_t) { return absl::OkStatus(); });
}

absl::Status PeerCollectives::ReduceParts(const std::vector<Part>& parts,
                                          char* out, const char* in,
                                          at::ScalarType dtype, ReduceOp op,
                                          const Agree& agree, Reduced reduced) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t chunk = ChunkBytes(world_size_) / element;
  const Part own = parts[rank_];
  const int64_t slot_bytes = std::min(chunk, own.size) * element;
  scratch_.resize(std::max<size_t>(scratch_.size(),
                                   kChunksInFlight * world_size_ * slot_bytes));
  const auto slot = [&](int64_t begin, int peer) {
    const int64_t index = (begin / chunk) % kChunksInFlight;
    return scratch_.data() + (index * world_size_ + peer) * slot_bytes;
  };

  Batch receives[kChunksInFlight] = {Batch(messages_), Batch(messages_)};
  Batch sends(messages_);
  const auto receive = [&](int64_t begin) -> absl::Status {
    const int64_t size = std::min(chunk, own.size - begin);
    for (int peer : Peers()) {
      FSDP_RETURN_IF_ERROR(
          messages_->Receive(peer, kDataTag, slot(begin, peer), size * element,
                             &receives[(begin / chunk) % kChunksInFlight]));
    }
    return absl::OkStatus();
  };

  if (own.size > 0) FSDP_RETURN_IF_ERROR(receive(0));
  FSDP_RETURN_IF_ERROR(agree());
  for (int peer : Peers()) {
    for (int64_t begin = parts[peer].begin; begin < parts[peer].end();
         begin += chunk) {
      const int64_t size = std::min(chunk, parts[peer].end() - begin);
      FSDP_RETURN_IF_ERROR(messages_->Send(peer, kDataTag, in + begin * element,
                                           size * element, &sends));
    }
  }
  std::vector<const void*> inputs(world_size_);
  for (int64_t begin = 0; begin < own.size; begin += chunk) {
    if (begin + chunk < own.size) FSDP_RETURN_IF_ERROR(receive(begin + chunk));
    FSDP_RETURN_IF_ERROR(
        messages_->Await(&receives[(begin / chunk) % kChunksInFlight]));
    for (int peer : Peers()) inputs[peer] = slot(begin, peer);
    inputs[rank_] = in + (own.begin + begin) * element;
    const int64_t size = std::min(chunk, own.size - begin);
    Reduce(dtype, op, inputs, size, out + begin * element);
    FSDP_RETURN_IF_ERROR(reduced(begin, size));
  }
  return messages_->Await(&sends);
}

// A peer's result arrives after the peer has received what this rank gives to
// it, so it may land where that was sent from.
absl::Status PeerCollectives::AllReduce(char* data, at::ScalarType dtype,
                                        int64_t count, ReduceOp op,
                                        const Agree& agree) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t chunk = ChunkBytes(world_size_) / element;
  const std::vector<Part> parts = Divide(count);
  const auto begin_of = [&](int rank) {
    return data + parts[rank].begin * element;
  };
  Batch receives(messages_);
  Batch sends(messages_);
  const auto agree_and_receive = [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(agree());
    for (int peer : Peers()) {
      for (int64_t begin = 0; begin < parts[peer].size; begin += chunk) {
        const int64_t size = std::min(chunk, parts[peer].size - begin);
        FSDP_RETURN_IF_ERROR(messages_->Receive(
            peer, kResultTag, begin_of(peer) + begin * element, size * element,
            &receives));
      }
    }
    return absl::OkStatus();
  };
  const auto hand_on = [&](int64_t begin, int64_t size) -> absl::Status {
    for (int peer : Peers()) {
      FSDP_RETURN_IF_ERROR(messages_->Send(peer, kResultTag,
                                           begin_of(rank_) + begin * element,
                                           size * element, &sends));
    }
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(ReduceParts(parts, begin_of(rank_), data, dtype, op,
                                   agree_and_receive, hand_on));
  FSDP_RETURN_IF_ERROR(messages_->Await(&receives));
  return messages_->Await(&sends);
}

// The root deals out the parts, then everyone passes its own part on: no rank
// sends more than twice the buffer, however many there are.
absl::Status PeerCollectives::Broadcast(char* data, int64_t bytes, int root,
                                        const Agree& agree) {
  const std::vector<Part> parts = Divide(bytes);
  const Part own = parts[rank_];
  Batch dealt(messages_);
  Batch receives(messages_);
  Batch sends(messages_);
  if (rank_ != root) {
    FSDP_RETURN_IF_ERROR(
        messages_->Receive(root, kDataTag, data + own.begin, own.size, &dealt));
    for (int peer : Peers()) {
      FSDP_RETURN_IF_ERROR(messages_->Receive(peer, kDataTag,
                                              data + parts[peer].begin,
                                              parts[peer].size, &receives));
    }
  }
  FSDP_RETURN_IF_ERROR(agree());
  if (rank_ == root) {
    for (int peer : Peers()) {
      FSDP_RETURN_IF_ERROR(messages_->Send(
          peer, kDataTag, data + parts[peer].begin, parts[peer].size, &sends));
    }
  }
  FSDP_RETURN_IF_ERROR(messages_->Await(&dealt));
  for (int peer : Peers()) {
    if (peer == root) continue;
    FSDP_RETURN_IF_ERROR(
        messages_->Send(peer, kDataTag, data + own.begin, own.size, &sends));
  }
  FSDP_RETURN_IF_ERROR(messages_->Await(&receives));
  return messages_->Await(&sends);
}

}  // namespace fsdp::comm
