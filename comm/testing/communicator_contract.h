// The tests that every Communicator passes.
#ifndef COMM_TESTING_COMMUNICATOR_CONTRACT_H_
#define COMM_TESTING_COMMUNICATOR_CONTRACT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {

// A backend under test: its test names one per way of making a group,
//   INSTANTIATE_TEST_SUITE_P(Local, CommunicatorContract,
//                            ::testing::Values(ContractBackend{...}),
//                            BackendName);
// and links :communicator_contract.
struct ContractBackend {
  std::string name;
  // Makes a group of `world_size` ranks of this process whose default timeout
  // is `timeout`.
  std::function<absl::StatusOr<Group>(int world_size, absl::Duration timeout)>
      create;
  // Sums have the bits of adding rank after rank, in float32 for 16-bit
  // numbers.
  bool sums_in_rank_order = true;
  // Calls that differ fail on every rank. If false, nobody compares them.
  bool compares_calls = true;
  // Groups of more ranks cannot be made, and their tests are skipped.
  int most_ranks = 8;
  // No call waits for those of the peers, so that one thread can play all
  // ranks. If false, tests run only with a thread for each rank.
  bool calls_are_alone = true;
  // Called in the thread of each rank.
  std::function<void(int rank)> enter = [](int) {};
  // The device of the tensors.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Called before and after each test.
  std::function<void()> begin = [] {};
  std::function<void()> end = [] {};
};

std::ostream& operator<<(std::ostream& out, const ContractBackend& backend);
std::string BackendName(const ::testing::TestParamInfo<ContractBackend>& info);

class CommunicatorContract : public ::testing::TestWithParam<ContractBackend> {
 protected:
  void SetUp() override { GetParam().begin(); }
  void TearDown() override { GetParam().end(); }

  // Makes the group of a test. Stops the test program if that fails.
  static Group Create(int world_size,
                      absl::Duration timeout = absl::Seconds(30));
  // Runs `fn` on all ranks of a group of each of `world_sizes` that the backend
  // can have. Skips the test if there is none.
  static void ExpectOkOn(const std::vector<int>& world_sizes,
                         const RankFunction& fn);
  static bool CanHave(int ranks) { return ranks <= GetParam().most_ranks; }
  static bool OneThreadCanBe(int ranks) {
    return CanHave(ranks) && (ranks == 1 || GetParam().calls_are_alone);
  }
};

// Calls RunRanks(), with each rank in its place on the backend's devices.
std::vector<absl::Status> RunAll(const Group& group, const RankFunction& fn);

// Returns the options of the tensors of the running test.
at::TensorOptions ContractTensor(at::ScalarType dtype);

// These are inputs of the collectives of a test, and their expected outputs.

// Returns the value of rank `rank` at index `i`. It and sums of eight are exact
// in every dtype.
double Value(int rank, int64_t i);

// Returns the values of all ranks, reduced.
double Reduced(ReduceOp op, int world_size, int64_t i);

using ValueAt = absl::FunctionRef<double(int64_t i)>;

// Makes a tensor with value(i) at index i.
at::Tensor MakeTensor(const at::TensorOptions& options, int64_t size,
                      ValueAt value);

// Returns Internal, with the first element that is not expected(i), or OK.
absl::Status CheckTensor(const at::Tensor& tensor, ValueAt expected);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_COMMUNICATOR_CONTRACT_H_
