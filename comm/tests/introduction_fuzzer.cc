// Reads what a rank of a group in shared memory tells its peer when they meet,
// and what it then has in its memory:
//   ./bazelw run --config=fuzz //comm/tests:introduction_fuzz -- DIR
// Stops the program if anything but an error comes of it, or a group that can
// be asked for a collective.
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "comm/shared_memory/shared_memory_communicator.h"

namespace fsdp::comm {
namespace {

constexpr size_t kIntroduction = 2 * sizeof(SegmentAddress);

// The input has a byte whose bits say which addresses become those of real
// memory, the introduction, and the content of this memory, which is repeated.
class Peer {
 public:
  explicit Peer(absl::string_view input) {
    const int real = input.empty() ? 0 : input[0];
    if (!input.empty()) input.remove_prefix(1);
    introduction_ = std::string(input.substr(0, kIntroduction));
    input.remove_prefix(introduction_.size());
    for (const int place : {0, 1}) {
      if ((real >> place & 1) != 0 && introduction_.size() == kIntroduction) {
        Point(place, input);
      }
    }
  }

  // Meets as rank 0 of two with this peer as rank 1.
  void Meet() const {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto says = [&](const std::string& key, const std::string& value) {
      store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
    };
    says("hosts/1", absl::StrCat("/", HostIdentity()));
    says("segments/1", introduction_);
    says("outcomes/1", "");
    SharedMemoryOptions options;
    options.timeout = absl::Seconds(30);
    auto group = CreateSharedMemoryCommunicator(store, 0, 2, options);
    if (!group.ok()) return;
    FSDP_CHECK(memory_.size() == 2);
    auto work = (*group)->AllReduce(at::zeros({4}), ReduceOp::kSum, "grads");
    if (work.ok()) {
      static_cast<void>((*work)->Wait(absl::Now() + absl::Milliseconds(1)));
    }
  }

 private:
  void Point(int place, absl::string_view content) {
    auto memory = SharedSegment::Create(sizeof(SharedRankBlock)).value();
    // The slots, which are most of it, hold numbers of any value.
    const size_t end = offsetof(SharedRankBlock, slots);
    for (size_t at = 0; at < end && !content.empty(); at += content.size()) {
      content.copy(memory->data() + at, end - at);
    }
    SegmentAddress address;
    char* const bytes = introduction_.data() + place * sizeof(address);
    std::memcpy(&address, bytes, sizeof(address));
    const int64_t size = address.bytes;
    address = memory->address();
    // The introduction keeps the size that it states, unless that is 0.
    if (size != 0) address.bytes = size;
    std::memcpy(bytes, &address, sizeof(address));
    memory_.push_back(std::move(memory));
  }

  std::string introduction_;
  std::vector<std::unique_ptr<SharedSegment>> memory_;
};

}  // namespace
}  // namespace fsdp::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::comm::Peer({reinterpret_cast<const char*>(data), size}).Meet();
  return 0;
}
