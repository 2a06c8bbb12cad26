#include "testing/simulation/simulated_ssd.h"

#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace fsdp::simulation {

using offload::IoQueue;
using offload::IoRequest;

class SimulatedSsd::Queue final : public IoQueue {
 public:
  Queue(SimulatedSsd& ssd, int descriptor, int depth)
      : ssd_(ssd), descriptor_(descriptor), depth_(depth) {}

  void Start(IoRequest* request) override {
    const int64_t number = ssd_.requests_++;
    const bool fails = number == ssd_.fails_at_;
    // The first write from then on.
    const bool tears = ssd_.tears_at_ >= 0 && number >= ssd_.tears_at_ &&
                       request->kind == IoRequest::Kind::kWrite;
    if (tears) ssd_.tears_at_ = -1;
    if (fails || tears) {
      ssd_.failed_at_ = ssd_.simulation_.elapsed_nanos();
      ssd_.simulation_.Log(fails ? "a request of the SSD fails"
                                 : "a write to the SSD is torn");
    }
    Simulation& simulation = ssd_.simulation_;
    const bool at_once = simulation.Chance(400);
    const int64_t bytes = tears ? request->bytes / 2 : request->bytes;
    if (at_once && !fails) Move(*request, bytes);
    simulation.After(simulation.RandomDelay(absl::Milliseconds(2)), [=] {
      if (!at_once && !fails) Move(*request, bytes);
      if (fails) request->result = -EIO;
      if (tears) request->result = request->bytes;
      over_.push_back(request);
    });
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    ssd_.simulation_.Block([this] { return woken_ || !over_.empty(); },
                           absl::InfiniteFuture());
    std::swap(over, over_);
    woken_ = false;
  }

  void Wake() override { woken_ = true; }
  int depth() const override { return depth_; }
  std::string Describe() const override { return "simulated"; }

 private:
  void Move(IoRequest& request, int64_t bytes) const {
    const auto size = static_cast<size_t>(bytes);
    ssize_t moved = 0;
    if (request.kind == IoRequest::Kind::kRead) {
      moved = pread(descriptor_, request.data, size, request.offset);
    } else if (request.kind == IoRequest::Kind::kWrite) {
      moved = pwrite(descriptor_, request.data, size, request.offset);
    }
    request.result = moved >= 0 ? moved : -errno;
  }

  SimulatedSsd& ssd_;
  const int descriptor_;
  const int depth_;
  std::vector<IoRequest*> over_;
  bool woken_ = false;
};

absl::StatusOr<std::unique_ptr<IoQueue>> SimulatedSsd::MakeQueue(
    offload::QueueKind /*kind*/, int descriptor, int depth) {
  return std::make_unique<Queue>(*this, descriptor, depth);
}

void SimulatedSsd::Fail(int64_t request) { fails_at_ = request; }
void SimulatedSsd::Tear(int64_t request) { tears_at_ = request; }

}  // namespace fsdp::simulation
