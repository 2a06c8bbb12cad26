#include "comm/meeting/store_message.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/plain_bytes.h"

namespace fsdp::comm {
namespace {

constexpr size_t kLengthBytes = 4;

std::optional<StoreMessage> DecodeBody(absl::string_view body) {
  BytesReader reader(body);
  StoreMessage message;
  message.code = reader.Take<uint8_t>();
  message.number = reader.Take<int64_t>();
  auto texts = reader.Take<uint32_t>();
  for (; texts > 0 && reader.ok(); --texts) {
    message.texts.emplace_back(reader.TakeBytes(reader.Take<uint32_t>()));
  }
  if (!reader.ok() || reader.left() > 0) return std::nullopt;
  return message;
}

}  // namespace

absl::StatusOr<std::string> EncodeFrame(const StoreMessage& message) {
  std::string body;
  AppendValue(body, message.code);
  AppendValue(body, message.number);
  AppendValue(body, static_cast<uint32_t>(message.texts.size()));
  for (const std::string& text : message.texts) {
    if (text.size() > kMaxFrameBytes) {
      body.resize(kMaxFrameBytes + 1);
      break;
    }
    AppendValue(body, static_cast<uint32_t>(text.size()));
    body += text;
  }
  if (body.size() > kMaxFrameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message to the job's store is longer than ",
                     kMaxFrameBytes, " bytes"));
  }
  std::string frame;
  AppendValue(frame, static_cast<uint32_t>(body.size()));
  return frame + body;
}

void FrameReader::Append(absl::string_view bytes) {
  buffer_.erase(0, begin_);
  begin_ = 0;
  buffer_.append(bytes.data(), bytes.size());
}

absl::StatusOr<std::optional<StoreMessage>> FrameReader::Next() {
  BytesReader rest(absl::string_view(buffer_).substr(begin_));
  const auto length = rest.Take<uint32_t>();
  if (!rest.ok()) return std::optional<StoreMessage>();
  if (length > kMaxFrameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", length, " bytes"));
  }
  if (rest.left() < length) return std::optional<StoreMessage>();
  std::optional<StoreMessage> message = DecodeBody(rest.TakeBytes(length));
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
