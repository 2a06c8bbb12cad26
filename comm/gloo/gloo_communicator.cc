#include "comm/gloo/gloo_communicator.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/gloo/message_transport.h"
#include "comm/group/c10d_status.h"

namespace fsdp::comm {
namespace {

constexpr char kName[] = "gloo";

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

// Returns the interface that has a numeric address, or "" if none has.
std::string InterfaceOf(const std::string& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size =
        family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST] = "";
    getnameinfo(one->ifa_addr, size, text, sizeof(text), nullptr, 0,
                NI_NUMERICHOST);
    if (address == text) name = one->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

// Returns where the others find this rank: "at 10.0.0.1 (interface eth0)".
std::string PlaceOf(const GlooOptions& options) {
  if (!options.interface.empty()) {
    return absl::StrCat("on interface ", options.interface);
  }
  if (options.hostname.empty()) return "at the address of this host's name";
  const std::string interface = InterfaceOf(options.hostname);
  return absl::StrCat(
      "at ", options.hostname,
      interface.empty() ? "" : absl::StrCat(" (interface ", interface, ")"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const GlooOptions& options) {
  FSDP_ASSIGN_OR_RETURN(
      const RankNames names,
      NamesOfMessageGroup(store, rank, world_size, kName, options));
  if (!options.hostname.empty() && !options.interface.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gloo on ", names.Name(rank), ": both a hostname (", options.hostname,
        ") and an interface (", options.interface, ") are given"));
  }
  // Gloo leaks memory if it does not find the interface.
  if (!options.interface.empty() &&
      if_nametoindex(options.interface.c_str()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gloo on ", names.Name(rank),
        ": this host has no network interface named ", options.interface));
  }
  // The device starts a thread.
  const SigpipeBlock no_sigpipe;
  std::shared_ptr<gloo::transport::Device> device;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      absl::StrCat(
          "open a Gloo device on ", names.Name(rank), " for ",
          options.hostname.empty() ? options.interface : options.hostname),
      [&] { device = CreateDevice(options); }));
  const auto factory =
      [device](const c10::intrusive_ptr<c10d::Store>& group_store,
               int group_rank, const RankNames& group, absl::Duration timeout)
      -> absl::StatusOr<std::unique_ptr<MessageTransport>> {
    c10::intrusive_ptr<ClosableGloo> gloo;
    const absl::Status connected = C10dToStatus("it cannot connect", [&] {
      auto gloo_options = c10d::ProcessGroupGloo::Options::create(
          absl::ToChronoMilliseconds(timeout));
      gloo_options->devices = {device};
      gloo_options->threads = 1;  // sends and receives need none
      gloo = c10::make_intrusive<ClosableGloo>(group_store, group_rank,
                                               group.size(), gloo_options);
    });
    FSDP_RETURN_IF_ERROR(connected);
    return C10dTransport(gloo, group,
                         [raw = gloo.get()] { raw->CloseConnections(); });
  };
  MessageOptions messages = options;
  messages.place = absl::StrCat(
      PlaceOf(options),
      ", which the others must reach: GLOO_SOCKET_IFNAME chooses an interface");
  return CreateMessageCommunicator(store, rank, world_size, kName, factory,
                                   messages);
}

}  // namespace fsdp::comm
