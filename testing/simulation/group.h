// The ranks of a group on a simulated network: in which order they call, which
// have failed, and when the others learn of it.
#ifndef TESTING_SIMULATION_GROUP_H_
#define TESTING_SIMULATION_GROUP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "testing/simulation/common_memories.h"
#include "testing/simulation/network.h"
#include "testing/simulation/operation.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

class Group;

// Is shared by all groups of a simulation; outlives their ranks.
struct Network {
  Network(Simulation& of, NetworkOptions network_options)
      : simulation(of), options(network_options), memories(of) {}

  // Tells that the ranks of `process` are dead for their peers.
  void ProcessDied(int process);

  Simulation& simulation;
  const NetworkOptions options;
  CommonMemories memories;
  std::vector<std::weak_ptr<Group>> groups;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  // The ranks are those of `processes`, in this order.
  static std::shared_ptr<Group> Make(Network& network,
                                     std::vector<int> processes,
                                     comm::RankNames names);

  int world_size() const { return static_cast<int>(processes_.size()); }
  Network& network() const { return network_; }
  const comm::RankNames& names() const { return names_; }
  Simulation& simulation() const { return network_.simulation; }
  const std::vector<int>& processes() const { return processes_; }
  bool IsDead(int rank) const;

  // Starts this rank's next operation. `label` is part of `call` unless it is a
  // collective that moves bytes.
  absl::StatusOr<std::shared_ptr<Operation>> Start(int rank,
                                                   const comm::Call& call,
                                                   comm::ReduceOp op, int root,
                                                   const Buffers& buffers);
  // Blocks until the result is there, or all is done. Errors: see Work::Wait().
  absl::Status Wait(int rank, const std::shared_ptr<Operation>& operation,
                    bool result_only, absl::Time deadline);

  // Returns this rank's part of memory of all ranks, which make the same calls.
  absl::StatusOr<at::Tensor> AllocateCommon(int rank, int64_t bytes);
  // Returns the group of the ranks of this one's color.
  absl::StatusOr<std::pair<std::shared_ptr<Group>, int>> Split(int rank,
                                                               int color,
                                                               int key);
  absl::Status Barrier(int rank, const std::string& label);

  // These are for fence number `fence` of the group, from 0.
  void Arrive(int rank, int64_t fence);
  absl::Status AwaitFence(int rank, int64_t fence, absl::Time deadline);

  void Abort(int rank, const absl::Status& reason);
  void Leave(int rank);
  void Died(int rank);

 private:
  struct Member {
    int64_t next_sequence = 0;
    std::optional<comm::Call> last_call;
    bool left = false;
    bool knows = false;  // knows that the group has failed
  };
  struct Failure {
    int rank;
    absl::Status own;
    std::string text;
    absl::StatusCode code_of_others;
  };
  // Ranks bring colors or memory to a call that moves no bytes and get seats.
  struct Meeting {
    std::vector<std::pair<int, int>> colors;  // and keys, by rank
    std::vector<std::pair<std::shared_ptr<Group>, int>> seats;
    std::vector<at::Tensor> memories;
  };
  struct FenceState {
    std::vector<int64_t> arrivals;                           // by rank
    std::vector<std::vector<CommonMemories::Clock>> clocks;  // by arrival
  };

  Group(Network& network, std::vector<int> processes, comm::RankNames names);

  absl::StatusOr<std::shared_ptr<Operation>> Meet(int rank,
                                                  const std::string& label,
                                                  std::string detail);
  void SeatAll(Meeting& meeting);
  void FailOnAbsentees(const Operation& operation);
  void Fail(Failure failure, bool at_once);
  void Learn(int rank);
  // Returns the operations that a rank may still wait for, or that move bytes.
  std::vector<std::shared_ptr<Operation>> Open();
  std::string LastSeen(int rank) const;
  absl::Status Error(int rank, absl::string_view what) const;
  absl::Status GiveUp(int rank, absl::string_view what,
                      const std::vector<std::string>& missing);
  FenceState& FenceOf(int64_t fence);

  Network& network_;
  const std::vector<int> processes_;
  const comm::RankNames names_;
  std::vector<Member> members_;
  // By sequence, those that not all ranks have called yet.
  std::map<int64_t, std::shared_ptr<Operation>> operations_;
  std::vector<std::weak_ptr<Operation>> open_;
  std::map<int64_t, Meeting> meetings_;  // by sequence
  std::map<int64_t, FenceState> fences_;
  std::optional<Failure> failure_;
};

// Creates the communicators of `processes`, by rank. `network` outlives them
// and the tensors that they give. Only CPU tensors are supported. Sums are made
// rank after rank. Any task of the simulation may call.
std::vector<std::unique_ptr<comm::Communicator>> CreateSimulatedGroup(
    Network& network, std::vector<int> processes);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_GROUP_H_
