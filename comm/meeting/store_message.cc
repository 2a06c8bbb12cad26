#include "comm/meeting/store_message.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fsdp::comm {
namespace {

constexpr size_t kLengthBytes = 4;

template <typename T>
void Put(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
}

// Takes the first bytes of `in`; returns false if there are too few.
template <typename T>
bool Take(absl::string_view* in, T* value) {
  if (in->size() < sizeof(T)) return false;
  uint64_t bits = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    bits |= uint64_t{static_cast<uint8_t>((*in)[i])} << (8 * i);
  }
  *value = static_cast<T>(bits);
  in->remove_prefix(sizeof(T));
  return true;
}

bool TakeText(absl::string_view* in, std::string* text) {
  uint32_t length = 0;
  if (!Take(in, &length) || in->size() < length) return false;
  *text = std::string(in->substr(0, length));
  in->remove_prefix(length);
  return true;
}

std::optional<StoreMessage> DecodeBody(absl::string_view body) {
  StoreMessage message;
  uint32_t count = 0;
  if (!Take(&body, &message.code) || !Take(&body, &message.number) ||
      !Take(&body, &count) || count > body.size() / kLengthBytes) {
    return std::nullopt;
  }
  message.texts.resize(count);
  for (std::string& text : message.texts) {
    if (!TakeText(&body, &text)) return std::nullopt;
  }
  if (!body.empty()) return std::nullopt;
  return message;
}

}  // namespace

absl::StatusOr<std::string> EncodeFrame(const StoreMessage& message) {
  std::string body;
  Put(message.code, &body);
  Put(message.number, &body);
  Put(static_cast<uint32_t>(message.texts.size()), &body);
  for (const std::string& text : message.texts) {
    if (text.size() > kMaxFrameBytes) {
      body.resize(kMaxFrameBytes + 1);
      break;
    }
    Put(static_cast<uint32_t>(text.size()), &body);
    body += text;
  }
  if (body.size() > kMaxFrameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message to the job's store is longer than ",
                     kMaxFrameBytes, " bytes"));
  }
  std::string frame;
  Put(static_cast<uint32_t>(body.size()), &frame);
  return frame + body;
}

void FrameReader::Append(absl::string_view bytes) {
  buffer_.erase(0, begin_);
  begin_ = 0;
  buffer_.append(bytes.data(), bytes.size());
}

absl::StatusOr<std::optional<StoreMessage>> FrameReader::Next() {
  absl::string_view rest = absl::string_view(buffer_).substr(begin_);
  uint32_t length = 0;
  if (!Take(&rest, &length)) return std::optional<StoreMessage>();
  if (length > kMaxFrameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", length, " bytes"));
  }
  if (rest.size() < length) return std::optional<StoreMessage>();
  std::optional<StoreMessage> message = DecodeBody(rest.substr(0, length));
  if (!message.has_value()) {
    return absl::InvalidArgumentError("a frame that holds no message");
  }
  begin_ += kLengthBytes + length;
  return message;
}

std::string CallerProof(absl::string_view secret,
                        absl::string_view listener_nonce,
                        absl::string_view caller_nonce) {
  return HmacSha256(secret, absl::StrCat(kStoreMagic, "caller", listener_nonce,
                                         caller_nonce));
}

std::string ListenerProof(absl::string_view secret,
                          absl::string_view listener_nonce,
                          absl::string_view caller_nonce) {
  return HmacSha256(secret, absl::StrCat(kStoreMagic, "listener",
                                         listener_nonce, caller_nonce));
}

}  // namespace fsdp::comm
