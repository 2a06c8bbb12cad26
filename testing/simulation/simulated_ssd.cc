#include "testing/simulation/simulated_ssd.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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
  Queue(SimulatedSsd& ssd, std::shared_ptr<std::vector<char>> file, int depth)
      : ssd_(ssd), file_(std::move(file)), depth_(depth) {}

  void Start(IoRequest* request) override {
    const int64_t number = ssd_.requests_++;
    const bool fails = number == ssd_.fails_at_;
    // Tears the next write, or shortens the next request that moves bytes.
    const bool tears = ssd_.tears_at_ >= 0 && number >= ssd_.tears_at_ &&
                       request->kind == IoRequest::Kind::kWrite;
    const bool is_mutant =
        ssd_.mutant_ == Mutant::kShortSsdMoves && number % 8 == 7;
    const bool shortens = (is_mutant || (ssd_.shortens_at_ >= 0 &&
                                         number >= ssd_.shortens_at_)) &&
                          request->kind != IoRequest::Kind::kSync;
    if (tears) ssd_.tears_at_ = -1;
    if (shortens) ssd_.shortens_at_ = -1;
    const bool lies = tears || (shortens && is_mutant);
    if (fails || tears || (shortens && !lies)) {
      ssd_.failed_at_ = ssd_.simulation_.elapsed_nanos();
      ssd_.simulation_.Log(fails   ? "a request of the SSD fails"
                           : tears ? "a write to the SSD is torn"
                                   : "a request of the SSD is done in part");
    }
    Simulation& simulation = ssd_.simulation_;
    const bool at_once = simulation.Chance(400);
    // A small model has its values in the front of its pages.
    const int64_t bytes = tears || shortens
                              ? static_cast<int64_t>(simulation.Random(
                                    std::min<int64_t>(request->bytes, 256)))
                              : request->bytes;
    if (at_once && !fails) Move(*request, bytes);
    simulation.After(simulation.RandomDelay(absl::Milliseconds(2)), [=] {
      if (!at_once && !fails) Move(*request, bytes);
      if (fails) request->result = -EIO;
      if (lies) request->result = request->bytes;
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
  // Moves bytes as pread(2) and pwrite(2) do in a file that keeps its size.
  void Move(IoRequest& request, int64_t bytes) const {
    const int64_t left = int64_t(file_->size()) - request.offset;
    const int64_t moved =
        std::clamp<int64_t>(bytes, 0, std::max<int64_t>(left, 0));
    char* const place = file_->data() + request.offset;
    if (request.kind == IoRequest::Kind::kRead) {
      std::memcpy(request.data, place, moved);
    } else if (request.kind == IoRequest::Kind::kWrite) {
      std::memcpy(place, request.data, moved);
    }
    request.result = request.kind == IoRequest::Kind::kSync ? 0 : moved;
  }

  SimulatedSsd& ssd_;
  const std::shared_ptr<std::vector<char>> file_;
  const int depth_;
  std::vector<IoRequest*> over_;
  bool woken_ = false;
};

int SimulatedSsd::Open(const std::string& /*path*/, int /*flags*/) {
  const int descriptor = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  files_[descriptor] = std::make_shared<std::vector<char>>();
  return descriptor;
}

int64_t SimulatedSsd::FreeBytes(int /*descriptor*/) { return int64_t{1} << 30; }

int SimulatedSsd::Allocate(int descriptor, int64_t bytes) {
  files_.at(descriptor)->resize(bytes);
  return 0;
}

absl::StatusOr<std::unique_ptr<IoQueue>> SimulatedSsd::MakeQueue(
    offload::QueueKind /*kind*/, int descriptor, int depth) {
  return std::make_unique<Queue>(*this, files_.at(descriptor), depth);
}

void SimulatedSsd::Fail(int64_t request) { fails_at_ = request; }
void SimulatedSsd::Tear(int64_t request) { tears_at_ = request; }
void SimulatedSsd::Shorten(int64_t request) { shortens_at_ = request; }

}  // namespace fsdp::simulation
