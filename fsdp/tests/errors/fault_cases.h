// Models that fail at a chosen point, and what is done with them.
#ifndef FSDP_TESTS_ERRORS_FAULT_CASES_H_
#define FSDP_TESTS_ERRORS_FAULT_CASES_H_

#include <ostream>

#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::faults {

// --- What is trained ---------------------------------------------------------

struct NetOptions {
  bool checkpoints = false;  // a region around a unit, and one inside another
  bool transparent = false;  // units are called directly
  bool frozen = false;       // the first unit
};

class Block;

class Net : public torch::nn::Module {
 public:
  // `injector` must outlive the net.
  Net(FaultInjector* injector, const NetOptions& options);

  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<Block> first, second;
  torch::nn::Linear head;

 private:
  at::Tensor Call(Block& block, const at::Tensor& x) const;

  FaultInjector* const injector_;
  const NetOptions options_;
};

using Model = FullyShardedDataParallel<Net>;

// One model of one rank.
struct Trainer {
  at::Tensor graph;  // of the last forward, outlives the model
  Model model;
  FaultInjector* injector;
  double loss = 0;  // of the last iteration
};

// --- What is done with it ----------------------------------------------------

// An iteration throws on any error. `part` numbers the data.
using Iteration = void (*)(Trainer& trainer, int64_t part);

void Train(Trainer& trainer, int64_t part);
// Trains with the user's own backward().
void TrainByPlainBackward(Trainer& trainer, int64_t part);
// Edits parameters one by one; the visitor may return its error.
void EditEach(Trainer& trainer, int64_t part);

struct Case {
  std::string name;
  int world = 2;
  Options options;
  Iteration iterate = &Train;
  NetOptions net;
  int replicas = 1;
  bool hooks = false;            // the model's own hooks
  bool edits = false;            // parameters may have changed before an error
  bool frees_at_failure = true;  // rather than at the next step
  bool tells_peers = true;       // when one rank fails
  // Some collectives run outside forward and backward: if they fail, they may
  // abort their group whatever the options say.
  bool outside_iteration = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c);

std::vector<Case> Cases();

absl::StatusOr<Trainer> MakeTrainer(const Case& c,
                                    const std::shared_ptr<Net>& net,
                                    Communicator& world,
                                    FaultInjector* injector);
// Makes a trainer of a new net.
absl::StatusOr<Trainer> MakeTrainer(const Case& c, Communicator& world,
                                    FaultInjector* injector);

}  // namespace fsdp::testing::faults

#endif  // FSDP_TESTS_ERRORS_FAULT_CASES_H_
