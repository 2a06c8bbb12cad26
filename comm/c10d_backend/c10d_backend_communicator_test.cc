// Uses Gloo's own collectives: ranks are threads, everything else is real.
#include "comm/c10d_backend/c10d_backend_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "absl/time/clock.h"
#include "base/output_file.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/gloo/message_transport.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {
namespace {

// LibTorch's flight recorder cannot stand the first operations of two groups at
// once, which ranks that are threads have.
[[maybe_unused]] const int kWithoutRecorder =
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Lacks an operation, and says so as c10d's base class does. From LibTorch 2.15
// on that one would call the operation by its other name.
class GlooWithoutExchange final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    TORCH_CHECK(false, "Backend gloo does not support alltoall_base");
  }
};

using Gloo = c10d::ProcessGroupGloo;

template <typename Kind>
absl::StatusOr<C10dConnection> ConnectGloo(const StorePtr& store, int rank,
                                           int world_size) {
  // The threads that start below inherit it.
  const SignalBlock no_sigpipe(SIGPIPE);
  c10::intrusive_ptr<Kind> gloo;
  FSDP_RETURN_IF_ERROR(TorchToStatus("connect", [&] {
    auto options =
        c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(30));
    options->devices = {
        c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
    gloo = c10::make_intrusive<Kind>(store, rank, world_size, options);
  }));
  C10dConnection connection;
  connection.backend = gloo;
  return connection;
}

template <typename Kind>
CreatedCommunicator CreateRank(const StorePtr& store, int rank, int world_size,
                               absl::Duration timeout) {
  FSDP_ASSIGN_OR_RETURN(
      C10dConnection connection,
      ConnectGloo<Kind>(c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                        rank, world_size));
  C10dBackendOptions options;
  options.timeout = timeout;
  options.connect = [](const C10dMeeting& meeting) {
    return ConnectGloo<Kind>(meeting.store, meeting.rank,
                             static_cast<int>(meeting.ranks.size()));
  };
  return CreateC10dBackendCommunicator(
      std::move(connection),
      c10::make_intrusive<c10d::PrefixStore>("group", store),
      std::move(options));
}

template <typename Kind>
absl::StatusOr<Group> CreateGroup(int world_size, absl::Duration timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return ConnectRanks(world_size, [&](int rank) {
    return CreateRank<Kind>(store, rank, world_size, timeout);
  });
}

ContractBackend GlooCollectives() {
  ContractBackend backend{"gloo_collectives", CreateGroup<Gloo>};
  backend.sums_in_rank_order = false;
  backend.compares_calls = false;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(C10dBackend, CommunicatorContract,
                         ::testing::Values(GlooCollectives()), BackendName);

TEST(C10dBackendCommunicatorTest, WhatTheBackendLacksIsUnimplementedAndNoHarm) {
  ASSERT_OK_AND_ASSIGN(Group group,
                       CreateGroup<GlooWithoutExchange>(2, absl::Seconds(30)));
  for (const auto& rank : group) {
    EXPECT_THAT(
        rank->AllToAll(at::zeros({4}), at::zeros({4}), "tokens"),
        StatusIs(Code::kUnimplemented,
                 AllOf(HasSubstr("all-to-all #0 of tokens"),
                       HasSubstr("gloo does not support alltoall_base"))));
  }
  EXPECT_OK(AllOk(RunRanks(group, [](Communicator& rank) {
    return Finish(rank.AllReduce(at::zeros({4}), ReduceOp::kSum, "sum"));
  })));
}

TEST(C10dBackendCommunicatorTest, WhatItIsNotGivenItDoesNotCall) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ASSERT_OK_AND_ASSIGN(C10dConnection connection,
                       ConnectGloo<GlooWithoutExchange>(store, 0, 1));
  C10dBackendOptions options;
  options.has_all_to_all = false;
  ASSERT_OK_AND_ASSIGN(
      auto communicator,
      CreateC10dBackendCommunicator(std::move(connection), store, options));
  EXPECT_FALSE(communicator->HasAllToAll());
  EXPECT_THAT(communicator->AllToAll(at::zeros({4}), at::zeros({4}), "tokens"),
              StatusIs(Code::kUnimplemented,
                       AllOf(HasSubstr("all-to-all of tokens on rank 0 of 1"),
                             HasSubstr("c10d's gloo on cpu"))));
  EXPECT_THAT(
      communicator->Split(0, 0),
      StatusIs(Code::kUnimplemented, HasSubstr("C10dBackendOptions::connect")));
}

TEST(C10dBackendCommunicatorTest, SaysWhatItIsAndTakesTensorsOfItsDeviceOnly) {
  ASSERT_OK_AND_ASSIGN(Group group, CreateGroup<Gloo>(1, absl::Seconds(30)));
  EXPECT_EQ(group[0]->ToString(), "c10d's gloo on cpu, rank 0 of 1");
  // The checks need no memory.
  const at::Tensor elsewhere =
      at::zeros({0}, at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
  EXPECT_THAT(group[0]->AllReduce(elsewhere, ReduceOp::kSum, "sum"),
              StatusIs(Code::kUnimplemented,
                       HasSubstr("was created for tensors on cpu, not meta")));
}

TEST(C10dBackendCommunicatorTest, RefusesWhatIsMissing) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(
      CreateC10dBackendCommunicator({}, store),
      StatusIs(Code::kInvalidArgument, HasSubstr("there must be a backend")));
  ASSERT_OK_AND_ASSIGN(C10dConnection connection,
                       ConnectGloo<Gloo>(store, 0, 1));
  EXPECT_THAT(CreateC10dBackendCommunicator(connection, nullptr),
              StatusIs(Code::kInvalidArgument, HasSubstr("a store")));
  C10dBackendOptions options;
  options.device = c10::Device(c10::DeviceType::CUDA);
  EXPECT_THAT(CreateC10dBackendCommunicator(connection, store, options),
              StatusIs(Code::kInvalidArgument, HasSubstr("cuda has no index")));
}

TEST(C10dBackendCommunicatorTest, TheBackendStaysTheCallersAfterwards) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ASSERT_OK_AND_ASSIGN(C10dConnection connection,
                       ConnectGloo<Gloo>(store, 0, 1));
  std::vector<at::Tensor> tensors = {at::full({3}, 2.0)};
  ASSERT_OK_AND_ASSIGN(auto communicator,
                       CreateC10dBackendCommunicator(connection, store));
  ASSERT_OK(Finish(communicator->AllReduce(tensors[0], ReduceOp::kSum, "sum")));
  communicator.reset();
  EXPECT_TRUE(connection.backend->allreduce(tensors)->wait());
}

TEST(C10dBackendCommunicatorTest, ABackendThatCannotBeClosedIsNotWaitedFor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<C10dConnection> connections(2);
  std::vector<std::thread> threads;
  threads.reserve(2);
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      connections[rank] = ConnectGloo<Gloo>(store, rank, 2).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  C10dConnection as_is = connections[0];
  as_is.close = [] {};
  ASSERT_OK_AND_ASSIGN(auto communicator,
                       CreateC10dBackendCommunicator(
                           as_is, c10::make_intrusive<c10d::HashStore>()));
  ASSERT_OK_AND_ASSIGN(auto work, communicator->AllReduce(
                                      at::zeros({4}), ReduceOp::kSum, "alone"));
  EXPECT_THAT(work->Wait(absl::Now() + absl::Milliseconds(50)),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("all-reduce #0 of alone on rank 0 of 2")));
  communicator.reset();
  // No message comes, which closes the connection.
  std::vector<at::Tensor> message = {at::zeros({1})};
  EXPECT_ANY_THROW(connections[0]
                       .backend->recv(message, 1, 7)
                       ->wait(std::chrono::milliseconds(1)));
}

}  // namespace
}  // namespace fsdp::comm::testing
