#include "testing/gpt/model/jitter.h"

#include <ctime>
#include <memory>
#include <random>

namespace gpt {
namespace {

// Returns the time of this thread, without waits and without what others
// compute on the same core.
double CpuSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

class Jitter::Clock {
 public:
  Clock(double share, uint64_t seed) : shares_(0, share), random_(seed) {}

  void Begin() { begin_ = CpuSeconds(); }

  // Computes for a part of the time since the last call.
  void Next() {
    const double now = CpuSeconds();
    const double end = now + shares_(random_) * (now - begin_);
    while (CpuSeconds() < end) {
    }
    begin_ = CpuSeconds();
  }

 private:
  std::uniform_real_distribution<double> shares_;
  std::mt19937_64 random_;
  double begin_ = CpuSeconds();
};

Jitter::Jitter(double share, uint64_t seed)
    : clock_(std::make_shared<Clock>(share, seed)) {}

void Jitter::Begin(const at::Tensor& x) {
  ProlongBackward(x);
  clock_->Begin();
}

void Jitter::Next(const at::Tensor& x) {
  ProlongBackward(x);
  clock_->Next();
}

void Jitter::ProlongBackward(const at::Tensor& x) const {
  if (!x.requires_grad()) return;
  x.register_hook([clock = clock_](const at::Tensor&) { clock->Next(); });
}

}  // namespace gpt
