#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/hmac.h"
#include "base/status_macros.h"
#include "comm/meeting/store_message.h"
#include "comm/meeting/store_server.h"

namespace fsdp::comm {

absl::Status StoreTable::Set(const std::string& key, std::string value) {
  const std::string* const old = Find(key);
  const size_t before = old == nullptr ? 0 : key.size() + old->size();
  const size_t after = key.size() + value.size();
  if (bytes_ - before + after > max_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job's store is full: it has ", bytes_, " of ",
                     max_bytes_, " bytes, and ", after, " are to be added"));
  }
  bytes_ += after - before;
  values_[key] = std::move(value);
  return absl::OkStatus();
}

absl::StatusOr<std::string> StoreTable::CompareAndSet(
    const std::string& key, const std::string& expected, std::string value) {
  const std::string* const old = Find(key);
  const bool sets = old == nullptr ? expected.empty() : *old == expected;
  if (!sets) return old == nullptr ? expected : *old;
  FSDP_RETURN_IF_ERROR(Set(key, value));
  return value;
}

absl::StatusOr<int64_t> StoreTable::Add(const std::string& key,
                                        int64_t addend) {
  const std::string* const old = Find(key);
  int64_t sum = 0;
  if (old != nullptr && !absl::SimpleAtoi(*old, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the key \"", key, "\" has no number to add to"));
  }
  if (__builtin_add_overflow(sum, addend, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the number of the key \"", key, "\" would overflow"));
  }
  FSDP_RETURN_IF_ERROR(Set(key, absl::StrCat(sum)));
  return sum;
}

bool StoreTable::Delete(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= key.size() + found->second.size();
  values_.erase(found);
  return true;
}

int64_t StoreTable::DeleteAll(absl::string_view prefix) {
  int64_t deleted = 0;
  for (auto entry = values_.begin(); entry != values_.end();) {
    const auto& [key, value] = *entry;
    if (!absl::StartsWith(key, prefix)) {
      ++entry;
      continue;
    }
    bytes_ -= key.size() + value.size();
    entry = values_.erase(entry);
    ++deleted;
  }
  return deleted;
}

const std::string* StoreTable::Find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const std::string* StoreTable::FirstMissing(
    const std::vector<std::string>& keys) const {
  for (const std::string& key : keys) {
    if (Find(key) == nullptr) return &key;
  }
  return nullptr;
}

namespace {

StoreMessage Done(int64_t number = 0, std::vector<std::string> texts = {}) {
  return {static_cast<uint8_t>(StoreReply::kDone), number, std::move(texts)};
}

StoreMessage Refused(absl::string_view why) {
  return {static_cast<uint8_t>(StoreReply::kRefused), 0, {std::string(why)}};
}

// The number of texts with each StoreAsk, from the first one on; -1: any
// number.
constexpr int kTexts[] = {
    /*kSet*/ 2,    /*kCompareAndSet*/ 3, /*kGet*/ 1,
    /*kAdd*/ 1,    /*kCheck*/ -1,        /*kWait*/ -1,
    /*kDelete*/ 1, /*kCount*/ 0,         /*kDeleteAll*/ 1};
static_assert(std::size(kTexts) == static_cast<size_t>(StoreAsk::kDeleteAll) -
                                       static_cast<size_t>(StoreAsk::kSet) + 1);

}  // namespace

StoreSession::StoreSession(std::string secret, std::string nonce,
                           StoreTable* table)
    : secret_(std::move(secret)),
      nonce_(std::move(nonce)),
      table_(table),
      output_(absl::StrCat(kStoreMagic, nonce_)) {}

absl::Status StoreSession::Receive(absl::string_view bytes, absl::Time now) {
  if (!accepted_) FSDP_RETURN_IF_ERROR(ReceiveClaim(&bytes));
  if (!accepted_) return absl::OkStatus();
  frames_.Append(bytes);
  return Advance(now);
}

absl::Status StoreSession::ReceiveClaim(absl::string_view* bytes) {
  const size_t count = std::min(bytes->size(), kClaimBytes - claim_.size());
  claim_.append(bytes->data(), count);
  bytes->remove_prefix(count);
  const absl::string_view begin =
      absl::string_view(claim_).substr(0, kStoreMagic.size());
  if (!absl::StartsWith(kStoreMagic, begin)) {
    return absl::InvalidArgumentError("not a rank of this library");
  }
  if (claim_.size() < kClaimBytes) return absl::OkStatus();
  const absl::string_view claim = claim_;
  const absl::string_view nonce = claim.substr(kStoreMagic.size(), kNonceBytes);
  const absl::string_view proof = claim.substr(kClaimBytes - kHmacBytes);
  if (!SameInConstantTime(proof, CallerProof(secret_, nonce_, nonce))) {
    return absl::PermissionDeniedError("does not know the job's secret");
  }
  accepted_ = true;
  output_ += ListenerProof(secret_, nonce_, nonce);
  return absl::OkStatus();
}

absl::Status StoreSession::Advance(absl::Time now) {
  if (is_waiting()) {
    const std::optional<StoreMessage> end = EndOfWait(now);
    if (!end.has_value()) return absl::OkStatus();
    wait_.reset();
    FSDP_RETURN_IF_ERROR(Reply(*end));
  }
  // One answer is on its way at a time, however many are asked for at once.
  while (accepted_ && wants_input()) {
    FSDP_ASSIGN_OR_RETURN(std::optional<StoreMessage> message, frames_.Next());
    if (!message.has_value()) break;
    FSDP_RETURN_IF_ERROR(Answer(*std::move(message), now));
  }
  return absl::OkStatus();
}

absl::Status StoreSession::Answer(StoreMessage message, absl::Time now) {
  const auto ask = static_cast<StoreAsk>(message.code);
  const bool is_known = ask >= StoreAsk::kSet && ask <= StoreAsk::kDeleteAll;
  const int texts = is_known ? kTexts[message.code - 1] : -1;
  if (!is_known ||
      (texts >= 0 && message.texts.size() != static_cast<size_t>(texts))) {
    return absl::InvalidArgumentError("a message that asks for nothing known");
  }
  const std::optional<StoreMessage> reply = Act(std::move(message), now);
  return reply.has_value() ? Reply(*reply) : absl::OkStatus();
}

std::optional<StoreMessage> StoreSession::Act(StoreMessage message,
                                              absl::Time now) {
  std::vector<std::string>& texts = message.texts;
  switch (const auto ask = static_cast<StoreAsk>(message.code)) {
    case StoreAsk::kSet: {
      const absl::Status set = table_->Set(texts[0], std::move(texts[1]));
      return set.ok() ? Done() : Refused(set.message());
    }
    case StoreAsk::kCompareAndSet: {
      absl::StatusOr<std::string> value =
          table_->CompareAndSet(texts[0], texts[1], std::move(texts[2]));
      if (!value.ok()) return Refused(value.status().message());
      return Done(0, {*std::move(value)});
    }
    case StoreAsk::kAdd: {
      const absl::StatusOr<int64_t> sum = table_->Add(texts[0], message.number);
      return sum.ok() ? Done(*sum) : Refused(sum.status().message());
    }
    case StoreAsk::kCheck:
      return Done(table_->FirstMissing(texts) == nullptr ? 1 : 0);
    case StoreAsk::kDelete:
      return Done(table_->Delete(texts[0]) ? 1 : 0);
    case StoreAsk::kCount:
      return Done(static_cast<int64_t>(table_->size()));
    case StoreAsk::kDeleteAll:
      if (texts[0].empty()) return Refused("all keys begin with an empty text");
      return Done(table_->DeleteAll(texts[0]));
    case StoreAsk::kGet:
    case StoreAsk::kWait: {
      wait_ = Wait{ask, std::move(texts), "",
                   now + absl::Milliseconds(message.number)};
      std::optional<StoreMessage> end = EndOfWait(now);
      if (end.has_value()) wait_.reset();
      return end;
    }
  }
  return std::nullopt;
}

std::optional<StoreMessage> StoreSession::EndOfWait(absl::Time now) {
  const std::string* const missing = table_->FirstMissing(wait_->keys);
  if (missing != nullptr) {
    wait_->missing = *missing;
    if (now < wait_->deadline) return std::nullopt;
    return StoreMessage{static_cast<uint8_t>(StoreReply::kNotThere), 0, {}};
  }
  if (wait_->ask == StoreAsk::kWait) return Done();
  return Done(0, {*table_->Find(wait_->keys[0])});
}

absl::Status StoreSession::Reply(const StoreMessage& reply) {
  FSDP_ASSIGN_OR_RETURN(const std::string frame, EncodeFrame(reply));
  output_ += frame;
  return absl::OkStatus();
}

}  // namespace fsdp::comm
