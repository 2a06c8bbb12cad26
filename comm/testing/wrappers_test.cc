// Tests RunRanks and the communicators that fail and come late in one program:
// torch takes longer to load than they take to test.
#include <ATen/ops/zeros.h>

#include <set>

#include "absl/time/time.h"
#include "base/testing/check_that.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/failing_communicator.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"
#include "comm/testing/staged/staged_communicator.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "comm/wrappers/paired_communicator.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

using Code = absl::StatusCode;

// Wrappers that do nothing are the communicator that they wrap.
using Wrap = std::unique_ptr<Communicator> (*)(std::unique_ptr<Communicator>);

std::unique_ptr<Communicator> FailNothing(std::unique_ptr<Communicator> base) {
  FailurePlan plan;
  plan.label = "nobody has this label";
  return FailOnPlan(std::move(base), plan);
}

ContractBackend Wrapped(std::string name, Wrap wrap) {
  return {
      std::move(name),
      [wrap](int world_size, absl::Duration timeout) -> absl::StatusOr<Group> {
        FSDP_ASSIGN_OR_RETURN(Group group,
                              CreateLocalGroup(world_size, {timeout}));
        for (auto& comm : group) comm = wrap(std::move(comm));
        return group;
      }};
}

// Lacks what a backend need not have.
class Plain final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  bool HasAllToAll() const override { return false; }
  CreatedCommunicator Split(int color, int key) override {
    FSDP_ASSIGN_OR_RETURN(auto part, base().Split(color, key));
    return std::make_unique<Plain>(std::move(part));
  }
};

std::unique_ptr<Communicator> WithoutExchange(
    std::unique_ptr<Communicator> base) {
  return std::make_unique<Plain>(std::move(base));
}

INSTANTIATE_TEST_SUITE_P(Wrapped, CommunicatorContract,
                         ::testing::Values(Wrapped("plain", WithoutExchange),
                                           Wrapped("failing", FailNothing)),
                         BackendName);

// Returns a rank of a device that scales inputs, as NCCL does.
std::unique_ptr<Communicator> DeviceRank() {
  FakeDevice::Register();
  LoopbackOptions options;
  options.device = FakeDevice::device();
  options.prefers_scaled_inputs = true;
  return CreateLoopback(options).value();
}

TEST(WrappersTest, CapabilitiesAreTheBases) {
  CollectiveLog log;
  QuantizationLog losses;
  QuantizationOptions measured;
  measured.log = &losses;
  Group wrapped;
  wrapped.push_back(DeviceRank());
  wrapped.push_back(Record(DeviceRank(), &log));
  wrapped.push_back(CreateQuantizedCommunicator(DeviceRank(), {}).value());
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  wrapped.push_back(
      CreatePairedCommunicator(std::move(hosts[0]), DeviceRank()).value());
  for (const auto& comm : wrapped) {
    EXPECT_TRUE(comm->PrefersScaledInputs()) << comm->ToString();
    EXPECT_TRUE(comm->CanBeCaptured()) << comm->ToString();
  }
  // The works of these make the host wait.
  Group waiting;
  waiting.push_back(FailNothing(DeviceRank()));
  waiting.push_back(
      CreateQuantizedCommunicator(DeviceRank(), measured).value());
  for (const auto& comm : waiting) {
    EXPECT_TRUE(comm->PrefersScaledInputs()) << comm->ToString();
    EXPECT_FALSE(comm->CanBeCaptured()) << comm->ToString();
  }
}

std::unique_ptr<Communicator> LocalRank() {
  return std::move(CreateLocalGroup(1).value()[0]);
}

std::unique_ptr<Communicator> SharingRank() {
  return std::move(CreateSharedMemoryGroup(1).value()[0]);
}

HierarchicalParts OneHost() { return {LocalRank(), LocalRank(), LocalRank()}; }

TEST(WrappersTest, AllToAllIsTheBases) {
  CollectiveLog log;
  FakeDevice::Register();
  const auto all_over = [&](const Wrap& base) {
    Group over;
    over.push_back(Record(base(LocalRank()), &log));
    over.push_back(CreateQuantizedCommunicator(base(LocalRank()), {}).value());
    over.push_back(
        CreatePairedCommunicator(LocalRank(), base(LocalRank())).value());
    over.push_back(
        CreateStagedCommunicator(base(LocalRank()), FakeDevice::device()));
    HierarchicalParts parts = OneHost();
    parts.host = base(std::move(parts.host));
    over.push_back(CreateHierarchicalCommunicator(std::move(parts)).value());
    parts = OneHost();
    parts.rail = base(std::move(parts.rail));
    over.push_back(CreateHierarchicalCommunicator(std::move(parts)).value());
    return over;
  };
  for (const bool has : {true, false}) {
    for (const auto& comm : all_over(has ? FailNothing : WithoutExchange)) {
      EXPECT_EQ(comm->HasAllToAll(), has) << comm->ToString();
    }
  }
  // A pair has the device's.
  const auto pair =
      CreatePairedCommunicator(WithoutExchange(LocalRank()), LocalRank())
          .value();
  EXPECT_TRUE(pair->HasAllToAll()) << pair->ToString();
}

TEST(WrappersTest, CommonMemoryIsTheBasesUnlessItWouldBeAnothers) {
  CollectiveLog log;
  QuantizationOptions exact_gathers;
  exact_gathers.gather = false;
  Group sharing;
  sharing.push_back(Record(SharingRank(), &log));
  sharing.push_back(FailNothing(SharingRank()));
  sharing.push_back(
      CreateQuantizedCommunicator(SharingRank(), exact_gathers).value());
  sharing.push_back(
      CreatePairedCommunicator(LocalRank(), SharingRank()).value());
  for (const auto& comm : sharing) {
    EXPECT_TRUE(comm->HasCommonMemory()) << comm->ToString();
    EXPECT_OK(comm->AllocateCommon(64)) << comm->ToString();
  }
  FakeDevice::Register();
  Group apart;
  apart.push_back(Record(LocalRank(), &log));
  apart.push_back(CreateQuantizedCommunicator(SharingRank(), {}).value());
  apart.push_back(CreatePairedCommunicator(SharingRank(), LocalRank()).value());
  apart.push_back(
      CreateStagedCommunicator(SharingRank(), FakeDevice::device()));
  HierarchicalParts parts = OneHost();
  parts.host = SharingRank();
  apart.push_back(CreateHierarchicalCommunicator(std::move(parts)).value());
  for (const auto& comm : apart) {
    EXPECT_FALSE(comm->HasCommonMemory()) << comm->ToString();
    EXPECT_THAT(comm->AllocateCommon(64),
                StatusIs(Code::kUnimplemented, HasSubstr("rank 0 of 1")));
  }
}

absl::Status SumOnce(Communicator& comm) {
  return Finish(comm.AllReduce(at::zeros({4}), ReduceOp::kSum, "grads"));
}

TEST(RunRanksTest, ARankThatFailsOrThrowsReleasesItsPeers) {
  const auto run = [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 2) throw StatusError(absl::DataLossError("torn page"));
    return SumOnce(comm);
  };
  const std::vector<absl::Status> statuses = RunRanks(3, run);
  EXPECT_THAT(statuses[0],
              StatusIs(Code::kAborted, HasSubstr("rank 2 aborted: torn page")));
  EXPECT_THAT(AllOk(statuses), StatusIs(Code::kDataLoss, "rank 2: torn page"));
}

TEST(RunRanksTest, NamesTheCauseBeforeItsEchoes) {
  const absl::Status gone = absl::UnavailableError("rank 2 is gone");
  const absl::Status aborted = absl::AbortedError("rank 2 aborted");
  const absl::Status cause = absl::InternalError("differs");
  const absl::Status ok;
  EXPECT_THAT(AllOk({{gone, aborted, cause, gone}}),
              StatusIs(Code::kInternal, "rank 2: differs"));
  EXPECT_THAT(AllOk({{ok, gone, aborted}}),
              StatusIs(Code::kUnavailable, HasSubstr("rank 1")));
  EXPECT_OK(AllOk({{ok, ok}}));
}

TEST(RunRanksTest, EndsRanksThatWaitTooLong) {
  const auto run = [](Communicator& comm) {
    return comm.rank() == 0 ? SumOnce(comm) : absl::OkStatus();
  };
  EXPECT_THAT(RunRanks(2, run, absl::Milliseconds(50))[0],
              StatusIs(Code::kAborted, HasSubstr("did not end within 50ms")));
}

TEST(LateCommunicatorTest, StartsWhatItIsToldToAfterAllPeers) {
  ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(3));
  CollectiveLog log;  // of rank 1, in the order of the base
  Progress progress(3);
  for (size_t rank = 0; rank < group.size(); ++rank) {
    std::set<Collective> late;
    if (rank == 1) {
      late = {Collective::kAllReduce};
      group[rank] = Record(std::move(group[rank]), &log);
    }
    group[rank] = StartLast(std::move(group[rank]), &progress, late);
  }
  const auto run = [&log](Communicator& comm) -> absl::Status {
    for (int64_t i = 0; i < 20; ++i) {
      if (comm.rank() != 1) {
        FSDP_RETURN_IF_ERROR(::fsdp::testing::CheckThat(
            log.TotalsOf(Collective::kAllReduce).count, ::testing::Le(i),
            "what rank 1, which is late, has called"));
      }
      FSDP_RETURN_IF_ERROR(SumOnce(comm));
    }
    return absl::OkStatus();
  };
  EXPECT_OK(AllOk(RunRanks(group, run)));
}

TEST(RecordingCommunicatorTest, WhatIsRefusedIsNotCounted) {
  CollectiveLog log;
  const auto comm = Record(LocalRank(), &log);
  const at::Tensor tensor = at::zeros({6});
  EXPECT_FALSE(comm->Broadcast(tensor, 1, "a").ok());
  comm->Abort(absl::InternalError("over"));
  EXPECT_FALSE(comm->Broadcast(tensor, 0, "a").ok());
  EXPECT_EQ(log.TotalsOf(Collective::kBroadcast).count, 0);
}

}  // namespace
}  // namespace fsdp::comm::testing
