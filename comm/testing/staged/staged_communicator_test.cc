#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/local/local_communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/ranks_of_one_host.h"
#include "comm/testing/run_ranks.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Code = absl::StatusCode;
const c10::Device kCpu = c10::Device(c10::DeviceType::CPU);

// Tells the fake device that the host reads and writes the buffers, and notes
// where they are.
class WatchedCommunicator final : public ForwardingCommunicator {
 public:
  explicit WatchedCommunicator(std::unique_ptr<Communicator> base,
                               std::vector<void*>* buffers = nullptr)
      : ForwardingCommunicator(std::move(base)), buffers_(buffers) {}

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    if (args.collective == Collective::kAllToAll) Touch(args.out);
    Touch(args.whole());
    return base().StartCollective(args, label);
  }

 private:
  void Touch(const at::Tensor& tensor) {
    if (buffers_ != nullptr) buffers_->push_back(tensor.data_ptr());
    if (tensor.numel() == 0) return;
    FakeDevice::HostRead(tensor, "collective");
    FakeDevice::HostWrite(tensor, "collective");
  }

  std::vector<void*>* const buffers_;
};

absl::StatusOr<Group> Staged(absl::StatusOr<Group> hosts, c10::Device device) {
  FSDP_RETURN_IF_ERROR(hosts.status());
  Group group;
  for (auto& host : *hosts) {
    if (!device.is_cpu()) {
      host = std::make_unique<WatchedCommunicator>(std::move(host));
    }
    FSDP_ASSIGN_OR_RETURN(auto staged,
                          CreateStagedCommunicator(std::move(host), device));
    group.push_back(std::move(staged));
  }
  return group;
}

void ForgetTheDevicesPast() {
  FakeDevice::Register();
  FakeDevice::Reset();
}

ContractBackend OnCpu() {
  ContractBackend backend;
  backend.name = "CpuOverLocal";
  backend.create = [](int world_size, absl::Duration timeout) {
    return Staged(CreateLocalGroup(world_size, {timeout}), kCpu);
  };
  // Only a default timeout's error does.
  backend.names_missing_ranks = false;
  return backend;
}

ContractBackend OnFakeDevice(bool shares_memory) {
  ContractBackend backend = OnCpu();
  backend.name = shares_memory ? "FakeOverSharedMemory" : "FakeOverLocal";
  backend.create = [shares_memory](int world_size, absl::Duration timeout) {
    return Staged(shares_memory ? CreateSharedMemoryGroup(world_size, timeout)
                                : CreateLocalGroup(world_size, {timeout}),
                  FakeDevice::device());
  };
  FakeDevice::Register();
  backend.device = FakeDevice::device();
  backend.begin = ForgetTheDevicesPast;
  backend.end = [] { EXPECT_THAT(FakeDevice::Races(), IsEmpty()); };
  return backend;
}

INSTANTIATE_TEST_SUITE_P(Staged, CommunicatorContract,
                         ::testing::Values(OnCpu(), OnFakeDevice(false),
                                           OnFakeDevice(true)),
                         BackendName);

class StagedCommunicatorTest : public ::testing::Test {
 protected:
  StagedCommunicatorTest() { ForgetTheDevicesPast(); }

  static absl::StatusOr<Group> Create(
      int world_size, absl::Duration timeout = absl::Seconds(30)) {
    return Staged(CreateLocalGroup(world_size, {timeout}),
                  FakeDevice::device());
  }

  const c10::Device device_ = FakeDevice::device();
};

at::Tensor OnDevice(int64_t size, double value) {
  return at::full({size}, value, at::TensorOptions(FakeDevice::device()));
}

TEST_F(StagedCommunicatorTest, NeitherCallsNorStreamsMakeTheHostSynchronize) {
  for (const int world_size : {1, 2, 3, 5}) {
    ASSERT_OK_AND_ASSIGN(const Group group, Create(world_size));
    const absl::Status status =
        AllOk(RunRanks(group, [&](Communicator& comm) -> absl::Status {
          const at::Tensor in = OnDevice(7, comm.rank());
          const at::Tensor out =
              at::empty({int64_t{7} * comm.world_size()}, in.options());
          for (int step = 0; step < 5; ++step) {
            in.add_(1);
            FSDP_ASSIGN_OR_RETURN(auto gathered, comm.AllGather(out, in, "w"));
            FSDP_RETURN_IF_ERROR(gathered->BlockCurrentStream());
            out.mul_(2);
            FSDP_ASSIGN_OR_RETURN(auto reduced, comm.ReduceScatterScaled(
                                                    in, out, {0.5, true}, "w"));
            FSDP_RETURN_IF_ERROR(reduced->BlockCurrentStream());
            in.div_(comm.world_size() + 1);
          }
          return absl::OkStatus();
        }));
    EXPECT_OK(status) << world_size;
  }
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(StagedCommunicatorTest, CallsReturnWhileTheDeviceComputesTheirInput) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(2));
  const at::Tensor sums[] = {OnDevice(5, 1), OnDevice(5, 2)};
  std::vector<std::unique_ptr<Work>> works;
  {
    const FakeDevice::Stall stall;
    for (int call = 0; call < 3; ++call) {
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_OK_AND_ASSIGN(
            auto work, group[rank]->AllReduce(sums[rank], ReduceOp::kSum, "w"));
        works.push_back(std::move(work));
      }
    }
  }
  for (const auto& work : works) {
    EXPECT_OK(work->Wait(absl::Now() + absl::Seconds(30)));
  }
  for (const at::Tensor& sum : sums) {
    EXPECT_EQ(sum.sum().item<float>(), 5 * 12);
  }
}

TEST_F(StagedCommunicatorTest, OverwritingTheInputWithoutAWaitIsARace) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(1));
  const at::Tensor in = OnDevice(5, 1);
  const at::Tensor out = OnDevice(5, 0);
  ASSERT_OK_AND_ASSIGN(const auto work, group[0]->AllGather(out, in, "w"));
  in.add_(1);
  ASSERT_OK(work->Wait(absl::Now() + absl::Seconds(30)));
  EXPECT_THAT(FakeDevice::Races(), Not(IsEmpty()));
}

TEST_F(StagedCommunicatorTest, ReadingTheResultWithoutAWaitIsARace) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(1));
  const at::Tensor sum = OnDevice(5, 1);
  std::optional<FakeDevice::Stall> stall(std::in_place);
  ASSERT_OK_AND_ASSIGN(const auto work,
                       group[0]->AllReduce(sum, ReduceOp::kSum, "w"));
  sum.sum();
  stall.reset();
  ASSERT_OK(work->Wait(absl::Now() + absl::Seconds(30)));
  EXPECT_THAT(FakeDevice::Races(), Not(IsEmpty()));
}

TEST_F(StagedCommunicatorTest, WorkThatIsDroppedKeepsItsTensorsUntilItIsDone) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(1));
  const at::Tensor next = OnDevice(1, 1);
  const int64_t before = FakeDevice::bytes_in_use();
  {
    const FakeDevice::Stall stall;
    ASSERT_OK(group[0]
                  ->AllReduce(OnDevice(1000, 1), ReduceOp::kSum, "dropped")
                  .status());
    EXPECT_EQ(FakeDevice::bytes_in_use() - before, 4000);
  }
  ASSERT_OK(Finish(group[0]->AllReduce(next, ReduceOp::kSum, "next")));
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(StagedCommunicatorTest, HostMemoryIsUsedAgain) {
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  std::vector<void*> buffers;
  ASSERT_OK_AND_ASSIGN(
      const auto staged,
      CreateStagedCommunicator(
          std::make_unique<WatchedCommunicator>(std::move(hosts[0]), &buffers),
          device_));
  for (const int64_t size : {1021, 7, 1021, 1}) {
    ASSERT_OK(
        Finish(staged->AllReduce(OnDevice(size, 1), ReduceOp::kSum, "w")));
  }
  EXPECT_THAT(buffers, ::testing::SizeIs(4));
  EXPECT_THAT(buffers, ::testing::Each(buffers[0]));
}

TEST_F(StagedCommunicatorTest, ADefaultTimeoutNamesTheRankThatIsMissing) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(2, absl::Milliseconds(50)));
  ASSERT_OK_AND_ASSIGN(
      const auto work,
      group[0]->AllReduce(OnDevice(5, 1), ReduceOp::kSum, "blocks.3"));
  EXPECT_THAT(work->BlockCurrentStream(),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("blocks.3 on rank 0 of 2"),
                             HasSubstr("rank 1"))));
}

TEST_F(StagedCommunicatorTest, InputThatIsNeverComputedEndsTheGroup) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(2, absl::Milliseconds(50)));
  const FakeDevice::Stall stall;
  ASSERT_OK_AND_ASSIGN(
      const auto work,
      group[0]->AllReduce(OnDevice(5, 1), ReduceOp::kSum, "blocks.3"));
  EXPECT_THAT(work->BlockCurrentStream(),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("blocks.3 on rank 0 of 2"),
                             HasSubstr("not computed its input after 50ms"))));
  EXPECT_THAT(group[1]->Split(0, 0),
              StatusIs(Code::kAborted,
                       HasSubstr("rank 0 aborted: all-reduce of blocks.3")));
}

// Its device stops when the host has the input.
class StallingCommunicator final : public ForwardingCommunicator {
 public:
  StallingCommunicator(std::unique_ptr<Communicator> base,
                       std::optional<FakeDevice::Stall>& stall)
      : ForwardingCommunicator(std::move(base)), stall_(stall) {}

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    stall_.emplace();
    return base().StartCollective(args, label);
  }

 private:
  std::optional<FakeDevice::Stall>& stall_;
};

TEST_F(StagedCommunicatorTest, AResultThatIsNeverTakenIsKeptUntilTheEnd) {
  ASSERT_OK_AND_ASSIGN(Group hosts,
                       CreateLocalGroup(1, {absl::Milliseconds(50)}));
  std::optional<FakeDevice::Stall> stall;
  ASSERT_OK_AND_ASSIGN(auto staged, CreateStagedCommunicator(
                                        std::make_unique<StallingCommunicator>(
                                            std::move(hosts[0]), stall),
                                        device_));
  const int64_t before = FakeDevice::bytes_in_use();
  EXPECT_THAT(
      Finish(staged->AllReduce(OnDevice(1000, 1), ReduceOp::kSum, "grads")),
      StatusIs(Code::kDeadlineExceeded,
               AllOf(HasSubstr("grads on rank 0 of 1"),
                     HasSubstr("not taken the result after 50ms"))));
  EXPECT_FALSE(staged->AllReduce(OnDevice(1, 1), ReduceOp::kSum, "w").ok());
  EXPECT_EQ(FakeDevice::bytes_in_use() - before, 4000);
  stall.reset();
  staged.reset();
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(StagedCommunicatorTest, AbortEndsAWaitForTheDevice) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(1));
  const FakeDevice::Stall stall;
  ASSERT_OK_AND_ASSIGN(
      const auto work,
      group[0]->AllReduce(OnDevice(5, 1), ReduceOp::kSum, "grads"));
  group[0]->Abort(absl::InternalError("disk full"));
  EXPECT_THAT(
      work->Wait(absl::Now() + absl::Seconds(30)),
      StatusIs(Code::kAborted, AllOf(HasSubstr("grads on rank 0 of 1"),
                                     HasSubstr("rank 0 aborted: disk full"))));
}

TEST_F(StagedCommunicatorTest, AllocatesOnItsDeviceAndSaysWhatItIsMadeOf) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(3));
  EXPECT_EQ(group[1]->ToString(),
            "staged on privateuseone:0 over local, rank 1 of 3");
  ASSERT_OK_AND_ASSIGN(const at::Tensor memory,
                       group[0]->AllocateSymmetric(1021));
  EXPECT_EQ(memory.device(), device_);
  EXPECT_THAT(group[0]->AllocateCommon(1021),
              StatusIs(Code::kUnimplemented, HasSubstr("staged")));
}

TEST_F(StagedCommunicatorTest, RefusesTensorsThatAreElsewhere) {
  ASSERT_OK_AND_ASSIGN(const Group group, Create(1));
  EXPECT_THAT(
      group[0]->AllReduce(at::ones({5}), ReduceOp::kSum, "w"),
      StatusIs(Code::kUnimplemented, AllOf(HasSubstr("w on rank 0 of 1"),
                                           HasSubstr("on privateuseone:0"),
                                           ::testing::EndsWith("not cpu"))));
  EXPECT_OK(Finish(group[0]->AllReduce(OnDevice(5, 1), ReduceOp::kSum, "w")));
}

TEST_F(StagedCommunicatorTest, RefusesGroupsThatCannotBe) {
  EXPECT_THAT(CreateStagedCommunicator(nullptr, device_),
              StatusIs(Code::kInvalidArgument, HasSubstr("no host group")));
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  EXPECT_THAT(
      CreateStagedCommunicator(std::move(hosts[0]),
                               c10::Device(c10::DeviceType::PrivateUse1)),
      StatusIs(Code::kInvalidArgument, HasSubstr("as in privateuseone:0")));
}

constexpr absl::Duration kLimit = absl::Seconds(30);

absl::Status ConnectAndSum(const Environment& environment) {
  ConnectOptions options;
  options.timeout = options.connect_timeout = kLimit;
  options.device = StagedBackend(c10::Device(c10::DeviceType::PrivateUse1));
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> world,
                        Connect(environment, options));
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> part,
                        world->Split(0, -world->rank()));
  for (Communicator* group : {world.get(), part.get()}) {
    FSDP_RETURN_IF_ERROR(SumRanks(*group, FakeDevice::device()));
    FSDP_RETURN_IF_ERROR(SumRanks(*group));
  }
  return absl::OkStatus();
}

TEST(StagedBackendTest, RanksShareADeviceAndHaveTheHostBesides) {
  FakeDevice::Register();
  for (const int world_size : {1, 2, 3}) {
    FakeDevice::Reset();
    const std::vector<Environment> ranks = RanksOfOneHost(world_size);
    std::vector<absl::Status> results;
    EXPECT_OK(RunInThreads(
        world_size, [&](int rank) { return ConnectAndSum(ranks[rank]); },
        &results));
    EXPECT_THAT(FakeDevice::Races(), ::testing::IsEmpty());
  }
}

TEST(StagedBackendTest, ADeviceThatIsNotThereIsTold) {
  ConnectOptions options;
  options.device = StagedBackend(c10::Device(c10::kCUDA));
  EXPECT_THAT(Connect(Environment(), options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("without support for cuda devices")));
}

}  // namespace
}  // namespace fsdp::comm::testing
