// Reads calls as peers announce them, in shared memory and over Gloo:
//   ./bazelw run --config=fuzz //comm/tests:call_fuzz -- DIR
// Stops the program if another call is taken for one's own, or a text is longer
// than its place.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "comm/communicator.h"
#include "comm/gloo/message_transport.h"
#include "comm/gloo/peer_collectives.h"
#include "comm/host/shared_host.h"

namespace fsdp::comm {
namespace {

void CheckImage(absl::string_view input) {
  CallImage image = {};
  input.copy(reinterpret_cast<char*>(&image), sizeof(image));
  const Call call = CallOf(image);
  FSDP_CHECK(call.label.size() <= 188 && call.dtype.size() <= 12 &&
             call.detail.size() <= 28);
  FSDP_CHECK(!ToString(call).empty());
  FSDP_CHECK(CallOf(ImageOf(call)) == call);
}

// A peer that has sent the input, filled up with what its peer sends.
class InputTransport final : public MessageTransport {
 public:
  explicit InputTransport(absl::string_view input) : input_(input) {}

  absl::StatusOr<std::shared_ptr<Message>> Send(int, int, const void* data,
                                                int64_t bytes) override {
    sent_.assign(static_cast<const char*>(data), bytes);
    if (received_ != nullptr && input_.size() < sent_.size()) {
      sent_.copy(received_ + input_.size(), sent_.size() - input_.size(),
                 input_.size());
    }
    return std::make_shared<DoneMessage>();
  }
  absl::StatusOr<std::shared_ptr<Message>> Receive(int, int, void* data,
                                                   int64_t bytes) override {
    received_ = static_cast<char*>(data);
    input_.copy(received_, bytes);
    return std::make_shared<DoneMessage>();
  }
  void Close() override {}

  bool is_as_sent() const {
    return input_.substr(0, sent_.size()) == sent_.substr(0, input_.size());
  }

 private:
  class DoneMessage final : public Message {
   public:
    absl::Status Wait() override { return absl::OkStatus(); }
    void Abort() override {}
  };

  const absl::string_view input_;
  char* received_ = nullptr;
  std::string sent_;
};

void CheckAnnouncement(absl::string_view input) {
  auto owned = std::make_unique<InputTransport>(input);
  const InputTransport& transport = *owned;
  PeerMessages messages(std::move(owned));
  CallExchange calls(0, RankNames(2), &messages);
  FSDP_CHECK(calls.Start().ok());
  FSDP_CHECK(
      calls.Announce(3, {Collective::kAllReduce, "grads", "float32", 4, "sum"})
          .ok());
  const bool is_as_sent = transport.is_as_sent();
  const absl::Status agreed = calls.Agree();
  FSDP_CHECK(agreed.ok() == is_as_sent);
  FSDP_CHECK(agreed.ok() || absl::IsInvalidArgument(agreed));
}

}  // namespace
}  // namespace fsdp::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  fsdp::comm::CheckImage(input);
  fsdp::comm::CheckAnnouncement(input);
  return 0;
}
