#include <net/if.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/c10d_communicator.h"
#include "comm/c10d_transport.h"
#include "comm/sigpipe_block.h"

namespace fsdp::comm {
namespace {

// Adds access to the connections.
class ClosableGloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void CloseConnections() {
    for (const auto& context : contexts_) context->closeConnections();
  }
};

std::shared_ptr<gloo::transport::Device> CreateDevice(
    const GlooOptions& options) {
  if (!options.hostname.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(options.hostname);
  }
  if (!options.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const GlooOptions& options) {
  if (!options.hostname.empty() && !options.interface.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gloo on rank ", rank, ": both a hostname (", options.hostname,
        ") and an interface (", options.interface, ") are given"));
  }
  // Gloo forgets some memory when it does not find the interface.
  if (!options.interface.empty() &&
      if_nametoindex(options.interface.c_str()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gloo on rank ", rank, ": this host has no network interface named ",
        options.interface));
  }
  // The device starts a thread.
  const SigpipeBlock no_sigpipe;
  std::shared_ptr<gloo::transport::Device> device;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      absl::StrCat(
          "open a Gloo device on rank ", rank, " for ",
          options.hostname.empty() ? options.interface : options.hostname),
      [&] { device = CreateDevice(options); }));
  const auto factory =
      [device, timeout = options.timeout](
          const c10::intrusive_ptr<c10d::Store>& group_store, int group_rank,
          int group_size) -> absl::StatusOr<std::unique_ptr<MessageTransport>> {
    c10::intrusive_ptr<ClosableGloo> gloo;
    FSDP_RETURN_IF_ERROR(TorchToStatus("connect to the other ranks", [&] {
      auto gloo_options = c10d::ProcessGroupGloo::Options::create(
          absl::ToChronoMilliseconds(timeout));
      gloo_options->devices = {device};
      gloo_options->threads = 1;  // sends and receives need none
      gloo = c10::make_intrusive<ClosableGloo>(group_store, group_rank,
                                               group_size, gloo_options);
    }));
    return C10dTransport(gloo, [raw = gloo.get()] { raw->CloseConnections(); });
  };
  return CreateC10dCommunicator(store, rank, world_size, "gloo", factory,
                                options);
}

}  // namespace fsdp::comm
