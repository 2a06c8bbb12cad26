// Models that fail at a chosen point, and what is done with them.
#ifndef FSDP_TESTS_ERRORS_FAULT_CASES_H_
#define FSDP_TESTS_ERRORS_FAULT_CASES_H_

#include <ostream>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
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

// The end of an iteration, and the type of its exception.
struct Outcome {
  absl::Status status;
  std::optional<FaultType> type;
};

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part);

absl::Status Wrong(const std::string& text);

// Checks that the outcome is the injected fault, by text and code, and with
// `keeps_type` by type, too.
absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type);

using Values = std::vector<at::Tensor>;

Values ShardsOf(const Trainer& trainer);
void SetShards(Trainer& trainer, const Values& values);

// Checks that each parameter has one of these values, and nothing in between.
absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices);
absl::Status CheckNothingGathered(const Trainer& trainer);
// Checks that both have done the same iteration.
absl::Status CheckSame(const Trainer& trainer, const Trainer& reference);

// Checks that a peer of rank `faulty_rank` has ended with its name, or without
// an error.
absl::Status CheckNamed(const absl::Status& status, int faulty_rank);

// A new group whose ranks have injectors.
class Group {
 public:
  Group(int world, bool aborts);

  FaultInjector* injector(int rank) { return &injectors_[rank]; }
  // Returns whether an injected fault has occurred on any rank.
  bool has_failed() const;

  absl::Status Run(const std::function<absl::Status(Communicator&)>& run);

 private:
  std::vector<FaultInjector> injectors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Waits until all ranks have called it, so that no rank learns of a failure by
// the end of another.
class EndOfAll {
 public:
  explicit EndOfAll(int world) : running_(world) {}

  absl::Status Reach();

 private:
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::testing::faults

#endif  // FSDP_TESTS_ERRORS_FAULT_CASES_H_
