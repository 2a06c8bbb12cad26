#include "comm/gloo/call_exchange.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

constexpr int kAnnouncementTag = 0;

// Truncates; always ends with a zero.
template <size_t kSize>
void CopyText(absl::string_view text, char (&field)[kSize]) {
  std::memcpy(field, text.data(), std::min(text.size(), kSize - 1));
}

// Of whatever bytes a peer has sent.
template <size_t kSize>
std::string TextOf(const char (&field)[kSize]) {
  return std::string(field, strnlen(field, kSize));
}

// FNV-1a: the same on every machine.
uint64_t Hash(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return hash;
}

}  // namespace

// What travels. Compared byte by byte, hence zeroed and without padding; ranks
// run the same program on machines of the same byte order.
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

absl::Status CallExchange::Start() { return PostReceives(); }

absl::Status CallExchange::PostReceives() {
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
  own.label_hash = Hash(call.label);
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
  FSDP_RETURN_IF_ERROR(Compare());
  return PostReceives();
}

absl::Status CallExchange::Compare() const {
  const Announcement& own = announcements_[rank_];
  std::vector<std::string> calls;
  bool equal = true;
  for (int peer = 0; peer < names_.size(); ++peer) {
    const Announcement& other = announcements_[peer];
    equal = equal && std::memcmp(&own, &other, sizeof(own)) == 0;
  }
  if (equal) return absl::OkStatus();
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

}  // namespace fsdp::comm
