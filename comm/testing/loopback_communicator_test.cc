#include "comm/testing/loopback_communicator.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::Finish;
using ::fsdp::testing::FakeDevice;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};
constexpr int64_t kSizes[] = {0, 1, 7, 1021};
constexpr at::ScalarType kDtypes[] = {at::kFloat,    at::kDouble, at::kHalf,
                                      at::kBFloat16, at::kInt,    at::kLong,
                                      at::kByte};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

std::unique_ptr<Communicator> Create(
    int rank, int world_size,
    c10::Device device = c10::Device(c10::DeviceType::CPU)) {
  LoopbackOptions options;
  options.place = {rank, world_size};
  options.device = device;
  return CreateLoopback(options).value();
}

// Returns small integers, whose sums are exact in every dtype. Bytes have all
// values of a byte.
at::Tensor Values(int64_t size, at::ScalarType dtype) {
  const at::Tensor values = at::arange(size, at::kLong).mul(37);
  return values.remainder(dtype == at::kByte ? 256 : 9).to(dtype);
}

// Makes a call on this rank of a loopback group, on the device, and on every
// rank of a group of threads that pass the same.
class Both {
 public:
  Both(int rank, int world_size, c10::Device device)
      : rank_(rank),
        device_(device),
        loopback_(Create(rank, world_size, device)),
        ranks_(CreateLocalGroup(world_size).value()) {}

  // `call` takes a communicator and its own copies of `tensors`, of which the
  // first shall then hold the same on both sides.
  template <typename Fn>
  void Compare(const std::vector<at::Tensor>& tensors, Fn call) {
    const std::vector<at::Tensor> actual = Copies(tensors, device_);
    ASSERT_OK(Finish(call(*loopback_, actual)));
    std::vector<at::Tensor> expected;
    std::vector<std::unique_ptr<Work>> works;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto copies = Copies(tensors, c10::Device(c10::DeviceType::CPU));
      works.push_back(call(*ranks_[rank], copies).value());
      if (static_cast<int>(rank) == rank_) expected = copies;
    }
    ASSERT_OK(works[rank_]->Wait(Soon()));
    EXPECT_TRUE(actual[0].cpu().equal(expected[0]));
  }

 private:
  static std::vector<at::Tensor> Copies(const std::vector<at::Tensor>& tensors,
                                        c10::Device device) {
    std::vector<at::Tensor> copies;
    copies.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      copies.push_back(tensor.clone().to(device));
    }
    return copies;
  }

  const int rank_;
  const c10::Device device_;
  const std::unique_ptr<Communicator> loopback_;
  const std::vector<std::unique_ptr<Communicator>> ranks_;
};

struct OnDevice {
  std::string name;
  c10::DeviceType type;
};

class LoopbackCommunicator : public ::testing::TestWithParam<OnDevice> {
 protected:
  LoopbackCommunicator() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }
  ~LoopbackCommunicator() override {
    EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  }

  static c10::Device device() {
    return GetParam().type == c10::DeviceType::CPU
               ? c10::Device(c10::DeviceType::CPU)
               : FakeDevice::device();
  }

  // Tests every rank of every world size with every size and dtype.
  template <typename Fn>
  static void ForAll(Fn test) {
    for (const int world_size : kWorldSizes) {
      for (const int rank : {0, world_size / 2, world_size - 1}) {
        Both both(rank, world_size, device());
        for (const int64_t size : kSizes) {
          for (const at::ScalarType dtype : kDtypes) {
            SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", world_size, ", ",
                                      size, " x ", c10::toString(dtype)));
            test(both, world_size, rank, size, dtype);
          }
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Devices, LoopbackCommunicator,
    ::testing::Values(OnDevice{"Cpu", c10::DeviceType::CPU},
                      OnDevice{"Fake", c10::DeviceType::PrivateUse1}),
    [](const auto& info) { return info.param.name; });

TEST_P(LoopbackCommunicator, DoesWhatRanksDoThatPassTheSame) {
  ForAll([](Both& both, int world_size, int rank, int64_t size,
            at::ScalarType dtype) {
    const at::Tensor part = Values(size, dtype);
    const at::Tensor whole = Values(size * world_size, dtype);
    const at::Tensor zeros = at::zeros({size * world_size}, dtype);
    both.Compare({zeros, part}, [](Communicator& group, const auto& t) {
      return group.AllGather(t[0], t[1], "w");
    });
    at::Tensor own = zeros.clone();
    own.narrow(0, rank * size, size).copy_(part);
    both.Compare({own}, [&](Communicator& group, const auto& t) {
      return group.AllGather(t[0],
                             t[0].narrow(0, group.rank() * size, size)
                                 .copy_(t[0].narrow(0, rank * size, size)),
                             "w");
    });
    both.Compare({zeros, whole}, [](Communicator& group, const auto& t) {
      return group.AllToAll(t[0], t[1], "w");
    });
    both.Compare({part}, [&](Communicator& group, const auto& t) {
      return group.Broadcast(t[0], world_size - 1, "w");
    });
    for (const ReduceOp op : kOps) {
      both.Compare({at::zeros({size}, dtype), whole},
                   [op](Communicator& group, const auto& t) {
                     return group.ReduceScatter(t[0], t[1], op, "w");
                   });
      both.Compare({part}, [op](Communicator& group, const auto& t) {
        return group.AllReduce(t[0], op, "w");
      });
    }
    if (!at::isFloatingType(dtype)) return;
    for (const at::ScalarType out_dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const bool accumulate : {false, true}) {
        both.Compare({at::ones({size}, out_dtype), whole}, [&](Communicator&
                                                                   group,
                                                               const auto& t) {
          return group.ReduceScatterScaled(t[0], t[1], {0.25, accumulate}, "w");
        });
      }
    }
  });
}

TEST_P(LoopbackCommunicator, ReducesIntoItsOwnSlice) {
  for (const int world_size : kWorldSizes) {
    const int rank = world_size / 2;
    const auto group = Create(rank, world_size, device());
    const at::Tensor in = at::ones({int64_t{7} * world_size}, device());
    const at::Tensor out = in.narrow(0, int64_t{7} * rank, 7);
    ASSERT_OK(Finish(group->ReduceScatter(out, in, ReduceOp::kSum, "w")));
    EXPECT_TRUE(out.cpu().eq(world_size).all().item<bool>());
  }
}

TEST_P(LoopbackCommunicator, SplitsIntoGroupsOfAll) {
  const auto whole = Create(4, 6, device());
  const auto same = whole->Split(0, 0).value();
  EXPECT_EQ(same->rank(), 4);
  EXPECT_EQ(same->world_size(), 6);
  EXPECT_EQ(whole->Split(-1, 0).status().code(), Code::kInvalidArgument);
}

TEST_P(LoopbackCommunicator, KnowsItsPlaceAndRefusesOneThatIsNot) {
  const auto group = Create(2, 5, device());
  EXPECT_EQ(group->rank(), 2);
  EXPECT_EQ(group->world_size(), 5);
  EXPECT_EQ(group->ToString(), "loopback, rank 2 of 5");
  for (const LoopbackPlace place :
       {LoopbackPlace{-1, 2}, LoopbackPlace{2, 2}, LoopbackPlace{0, 0}}) {
    LoopbackOptions options;
    options.place = place;
    EXPECT_EQ(CreateLoopback(options).status().code(), Code::kInvalidArgument);
  }
}

TEST_P(LoopbackCommunicator, AllocatesWhereItsTensorsAre) {
  const auto group = Create(0, 2, device());
  for (const int64_t bytes : kSizes) {
    const at::Tensor memory = group->AllocateSymmetric(bytes).value();
    EXPECT_EQ(memory.device(), device());
    EXPECT_EQ(memory.nbytes(), static_cast<size_t>(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 64, 0u);
  }
  EXPECT_EQ(group->AllocateSymmetric(-1).status().code(),
            Code::kInvalidArgument);
}

TEST_P(LoopbackCommunicator, AbortEndsWhatComesAfterIt) {
  const auto group = Create(0, 2, device());
  const at::Tensor x = at::ones({2}, device());
  auto done = group->AllReduce(x, ReduceOp::kSum, "w").value();
  ASSERT_OK(done->Wait(Soon()));
  group->Abort(absl::InternalError("the first reason"));
  group->Abort(absl::InternalError("another"));
  const absl::Status status = Finish(group->AllReduce(x, ReduceOp::kSum, "w"));
  EXPECT_EQ(status.code(), Code::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the first reason"));
  EXPECT_EQ(group->Split(0, 0).status().code(), Code::kAborted);
  EXPECT_OK(done->Wait(absl::InfinitePast()));
}

class LoopbackStreams : public ::testing::Test {
 protected:
  LoopbackStreams() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }

  const c10::Device device_ = FakeDevice::device();
};

TEST_F(LoopbackStreams, OperationsRunBesideTheStreamOfTheCaller) {
  const auto group = Create(1, 3, device_);
  const at::Tensor in = at::ones({7}, device_);
  const at::Tensor out = at::empty({21}, device_);
  const auto work = group->AllGather(out, in, "w").value();
  in.add_(1);  // what the gather still reads
  EXPECT_THAT(FakeDevice::Races(), ::testing::Not(IsEmpty()));
}

TEST_F(LoopbackStreams, WorkThatIsDroppedKeepsItsTensorsUntilItIsDone) {
  const auto group = Create(0, 2, device_);
  const int64_t before = FakeDevice::bytes_in_use();
  {
    const FakeDevice::Stall stall;
    {
      const at::Tensor x = at::ones({1000}, device_);
      ASSERT_OK(group->AllReduce(x, ReduceOp::kSum, "w").status());
    }
    EXPECT_EQ(FakeDevice::bytes_in_use() - before, 4000);
  }
  ASSERT_OK(
      Finish(group->AllReduce(at::ones({1}, device_), ReduceOp::kSum, "next")));
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(LoopbackStreams, AMissedDeadlineEndsTheGroup) {
  const auto group = Create(0, 2, device_);
  const at::Tensor x = at::ones({7}, device_);
  auto work = group->AllReduce(x, ReduceOp::kSum, "blocks.3").value();
  {
    const FakeDevice::Stall stall;
    const absl::Status late = work->Wait(absl::Now() + absl::Milliseconds(3));
    EXPECT_EQ(late.code(), Code::kDeadlineExceeded);
    EXPECT_THAT(std::string(late.message()), HasSubstr("blocks.3"));
  }
  EXPECT_EQ(group->AllReduce(x, ReduceOp::kSum, "w").status().code(),
            Code::kAborted);
}

TEST_F(LoopbackStreams, AbortEndsAWait) {
  const auto group = Create(0, 2, device_);
  const at::Tensor x = at::ones({7}, device_);
  auto work = group->AllReduce(x, ReduceOp::kSum, "w").value();
  const FakeDevice::Stall stall;
  group->Abort(absl::InternalError("reason"));
  EXPECT_EQ(work->Wait(Soon()).code(), Code::kAborted);
}

TEST_F(LoopbackStreams, TakesTensorsOfTheCpuBesides) {
  const auto group = Create(0, 2, device_);
  const at::Tensor x = at::ones({7});
  ASSERT_OK(Finish(group->AllReduce(x, ReduceOp::kSum, "w")));
  EXPECT_EQ(x.sum().item<float>(), 14);
  const auto on_cpu = Create(0, 2);
  EXPECT_EQ(on_cpu->AllReduce(at::ones({7}, device_), ReduceOp::kSum, "w")
                .status()
                .code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace fsdp::comm
