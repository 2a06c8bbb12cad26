// A backend whose works make a stream wait, as NCCL's do, on the fake device.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/c10d_backend/c10d_backend_communicator.h"
#include "comm/communicator.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using C10dReduceOp = c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kRank = 1;
constexpr int kRanks = 3;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

class StreamWork final : public c10d::Work {
 public:
  StreamWork() { done_.Record(FakeDevice::device()); }

  bool isCompleted() override { return error_ != nullptr || done_.Done(); }
  std::exception_ptr exception() const override { return error_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    done_.BlockCurrentStream();
    return true;
  }

  void Fail(const std::string& why) {
    error_ = std::make_exception_ptr(std::runtime_error(why));
  }

 private:
  DeviceEvent done_;
  std::exception_ptr error_;
};

// A rank whose peers pass what it passes.
class StreamBackend final : public c10d::Backend {
 public:
  explicit StreamBackend(std::string name)
      : Backend(kRank, kRanks), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void abort() override {
    ++num_aborts;
    stall.reset();
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    return Run([&] { Scale(tensors[0], options.reduceOp); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& /*options*/) override {
    return Run([&] { FakeDevice::Touch(tensors[0], true, "broadcast"); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& /*options*/) override {
    return Run([&] { out.copy_(in.clone().repeat({kRanks})); });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in,
      const c10d::ReduceScatterOptions& options) override {
    return Run([&] {
      out.copy_(in.narrow(0, kRank * out.numel(), out.numel()));
      Scale(out, options.reduceOp);
    });
  }

  std::unique_ptr<FakeDevice::Stall> stall;  // until abort()
  std::exception_ptr at_start;
  C10dReduceOp::RedOpType last_op = C10dReduceOp::UNUSED;
  int num_aborts = 0;
  c10::intrusive_ptr<StreamWork> last;

 private:
  WorkPtr Run(const std::function<void()>& operation) {
    if (at_start != nullptr) std::rethrow_exception(at_start);
    stream_.FollowCurrentStream();
    const SideStream::Scope scope(stream_);
    operation();
    last = c10::make_intrusive<StreamWork>();
    return last;
  }

  void Scale(at::Tensor& sum, const C10dReduceOp& op) {
    last_op = op.op_;
    sum.mul_(last_op == C10dReduceOp::SUM ? kRanks : 1);
  }

  const std::string name_;
  SideStream stream_{FakeDevice::device()};
};

class C10dBackendStreamTest : public ::testing::Test {
 protected:
  C10dBackendStreamTest() {
    FakeDevice::Register();
    FakeDevice::Reset();
    Connect("nccl");
  }
  ~C10dBackendStreamTest() override {
    EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  }

  void Connect(const std::string& name) {
    communicator_.reset();
    backend_ = c10::make_intrusive<StreamBackend>(name);
    C10dConnection connection;
    connection.backend = backend_;
    connection.leave = [this] { ++num_leaves_; };
    C10dBackendOptions options;
    options.device = FakeDevice::device();
    options.timeout = absl::Seconds(30);
    options.diagnosis_timeout = absl::Milliseconds(20);  // there are no peers
    options.is_capturing = [this] { return is_capturing_; };
    communicator_ = CreateC10dBackendCommunicator(
                        std::move(connection),
                        c10::make_intrusive<c10d::HashStore>(), options)
                        .value();
  }

  static at::Tensor Full(int64_t size, double value,
                         at::ScalarType dtype = at::kFloat) {
    return at::full(
        {size}, value,
        at::TensorOptions().dtype(dtype).device(FakeDevice::device()));
  }

  static bool AllAre(const at::Tensor& tensor, double value) {
    const at::Tensor here = tensor.cpu();
    return here.equal(at::full_like(here, value));
  }

  bool is_capturing_ = false;
  int num_leaves_ = 0;
  c10::intrusive_ptr<StreamBackend> backend_;
  std::unique_ptr<Communicator> communicator_;
};

TEST_F(C10dBackendStreamTest, FollowsTheCurrentStreamWithoutTheHost) {
  const at::Tensor shard = Full(7, 2);
  const at::Tensor whole = Full(int64_t{7} * kRanks, 0);
  const at::Tensor sum = Full(7, 0);
  const auto run = [&]() -> absl::Status {
    for (int step = 0; step < 3; ++step) {
      FSDP_ASSIGN_OR_RETURN(auto gather,
                            communicator_->AllGather(whole, shard, "gather"));
      FSDP_RETURN_IF_ERROR(gather->BlockCurrentStream());
      whole.mul_(5);
      FSDP_ASSIGN_OR_RETURN(auto reduce, communicator_->ReduceScatterScaled(
                                             sum, whole, {0.5, true}, "mean"));
      FSDP_RETURN_IF_ERROR(reduce->BlockCurrentStream());
      sum.add_(1);
      FSDP_ASSIGN_OR_RETURN(auto copy, communicator_->Broadcast(sum, 0, "sum"));
      FSDP_RETURN_IF_ERROR(copy->BlockCurrentStream());
    }
    return absl::OkStatus();
  };
  ASSERT_OK(run());
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_TRUE(AllAre(sum, 3 * (2 * 5 * kRanks * 0.5 + 1)));
}

TEST_F(C10dBackendStreamTest, AScaleComesBehindAPlainSum) {
  EXPECT_TRUE(communicator_->PrefersScaledInputs());
  for (double scale : {0.25, 1.0}) {
    for (bool accumulate : {false, true}) {
      for (at::ScalarType to : {at::kFloat, at::kDouble}) {
        const at::Tensor out = Full(5, 100, to);
        ASSERT_OK_AND_ASSIGN(auto work, communicator_->ReduceScatterScaled(
                                            out, Full(int64_t{5} * kRanks, 4),
                                            {scale, accumulate}, "mean"));
        ASSERT_OK(work->Wait(Soon()));
        EXPECT_TRUE(AllAre(out, 4 * scale * kRanks + (accumulate ? 100 : 0)));
        EXPECT_EQ(backend_->last_op, C10dReduceOp::SUM);
      }
    }
  }
}

TEST_F(C10dBackendStreamTest, NothingIsSentOfNothing) {
  ASSERT_OK_AND_ASSIGN(
      auto work, communicator_->AllReduce(Full(0, 0), ReduceOp::kSum, "empty"));
  EXPECT_OK(work->BlockCurrentStream());
  EXPECT_OK(work->Wait(Soon()));
  EXPECT_EQ(backend_->last, nullptr);
}

TEST_F(C10dBackendStreamTest, ADroppedWorkKeepsItsTensorsUntilItIsDone) {
  at::Tensor tensor = Full(7, 1);
  {
    const FakeDevice::Stall stall;
    ASSERT_OK(communicator_->AllReduce(tensor, ReduceOp::kSum, "dropped"));
    EXPECT_GT(tensor.use_count(), 1u);
  }
  ASSERT_OK_AND_ASSIGN(
      auto next, communicator_->AllReduce(Full(1, 1), ReduceOp::kSum, "next"));
  EXPECT_OK(next->Wait(Soon()));
  EXPECT_EQ(tensor.use_count(), 1u);
}

// Captured operations are not done before the graph is launched, for which the
// stall stands.
TEST_F(C10dBackendStreamTest, NobodyWaitsForWhatIsCaptured) {
  EXPECT_TRUE(communicator_->CanBeCaptured());
  const FakeDevice::Stall until_launched;
  is_capturing_ = true;
  ASSERT_OK_AND_ASSIGN(auto work, communicator_->AllReduce(
                                      Full(7, 1), ReduceOp::kSum, "captured"));
  EXPECT_OK(work->BlockCurrentStream());
  EXPECT_THAT(work->Wait(Soon()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("all-reduce #0 of captured"),
                             HasSubstr("part of a graph"))));
  is_capturing_ = false;
  communicator_.reset();
  EXPECT_EQ(num_leaves_, 1);
  EXPECT_EQ(backend_->num_aborts, 0);
}

TEST_F(C10dBackendStreamTest, AMissedDeadlineAbortsTheBackend) {
  backend_->stall = std::make_unique<FakeDevice::Stall>();
  ASSERT_OK_AND_ASSIGN(
      auto work, communicator_->AllReduce(Full(7, 1), ReduceOp::kSum, "slow"));
  EXPECT_THAT(work->Wait(absl::Now() + absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("all-reduce #0 of slow on rank 1 of 3")));
  EXPECT_EQ(backend_->num_aborts, 1);
  EXPECT_FALSE(communicator_->AllReduce(Full(7, 1), ReduceOp::kSum, "x").ok());
}

TEST_F(C10dBackendStreamTest, AnErrorOfAWorkEndsTheGroup) {
  ASSERT_OK_AND_ASSIGN(auto work, communicator_->AllReduce(
                                      Full(7, 1), ReduceOp::kSum, "broken"));
  backend_->last->Fail("remote process exited");
  EXPECT_THAT(work->Wait(Soon()),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("all-reduce #0 of broken"),
                             HasSubstr("remote process exited"))));
  EXPECT_EQ(backend_->num_aborts, 1);
}

TEST_F(C10dBackendStreamTest, AnErrorAtTheStartEndsTheGroup) {
  backend_->at_start =
      std::make_exception_ptr(std::runtime_error("unhandled system error"));
  EXPECT_THAT(communicator_->AllReduce(Full(7, 1), ReduceOp::kSum, "start"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("unhandled system error")));
  backend_->at_start = nullptr;
  EXPECT_FALSE(communicator_->AllReduce(Full(7, 1), ReduceOp::kSum, "x").ok());
  EXPECT_EQ(backend_->num_aborts, 1);
}

TEST_F(C10dBackendStreamTest, LeavesInPeaceOnlyWhereNothingRuns) {
  communicator_.reset();
  EXPECT_EQ(num_leaves_, 1);
  EXPECT_EQ(backend_->num_aborts, 0);
  Connect("nccl");
  backend_->stall = std::make_unique<FakeDevice::Stall>();
  ASSERT_OK(communicator_->AllReduce(Full(7, 1), ReduceOp::kSum, "runs"));
  communicator_.reset();
  EXPECT_EQ(num_leaves_, 1);
  EXPECT_EQ(backend_->num_aborts, 1);
}

TEST_F(C10dBackendStreamTest, AllocatesOnTheDevice) {
  ASSERT_OK_AND_ASSIGN(const at::Tensor memory,
                       communicator_->AllocateSymmetric(10));
  EXPECT_EQ(memory.device(), FakeDevice::device());
  EXPECT_EQ(memory.numel(), 10);
}

}  // namespace
}  // namespace fsdp::comm
