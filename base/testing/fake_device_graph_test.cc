#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class FakeDeviceGraphTest : public ::testing::Test {
 protected:
  FakeDeviceGraphTest() {
    FakeDevice::Register();
    FakeDevice::Reset();
    stream_ = std::make_unique<SideStream>(FakeDevice::device());
    graph_ = std::make_unique<FakeDeviceGraph>();
  }

  static at::Tensor Of(const std::vector<float>& values) {
    return at::tensor(values).to(FakeDevice::device());
  }
  static std::vector<float> Values(const at::Tensor& tensor) {
    const at::Tensor host = tensor.cpu();
    return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
  }

  // Captures what `queue` gives to the stream.
  template <typename Fn>
  absl::Status Capture(Fn queue) {
    stream_->FollowCurrentStream();
    absl::Status status;
    {
      const SideStream::Scope scope(*stream_);
      EXPECT_OK(graph_->BeginCapture());
      queue();
      status = graph_->EndCapture();
    }
    stream_->BlockCurrentStream();
    return status;
  }

  std::unique_ptr<SideStream> stream_;
  std::unique_ptr<FakeDeviceGraph> graph_;
};

TEST_F(FakeDeviceGraphTest, RunsInReplaysOnly) {
  const at::Tensor in = Of({1, 2});
  const at::Tensor sum = Of({10, 20});
  at::Tensor out;
  ASSERT_OK(Capture([&] {
    out = in * 2;
    sum.add_(out);
  }));
  EXPECT_THAT(Values(sum), ElementsAre(10, 20));
  EXPECT_TRUE(out.cpu().isnan().all().item<bool>());
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(Values(sum), ElementsAre(12, 24));
  in.copy_(Of({3, 4}));
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(Values(out), ElementsAre(6, 8));
  EXPECT_THAT(Values(sum), ElementsAre(18, 32));
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(FakeDeviceGraphTest, RandomNumbersGoOn) {
  at::manual_seed(3);
  const at::Tensor drawn = Of({0, 0});
  drawn.uniform_();
  const std::vector<float> first = Values(drawn);
  drawn.uniform_();
  const std::vector<float> second = Values(drawn);
  at::manual_seed(3);
  ASSERT_OK(Capture([&] { drawn.uniform_(); }));
  ASSERT_OK(graph_->Replay());
  EXPECT_EQ(Values(drawn), first);
  ASSERT_OK(graph_->Replay());
  EXPECT_EQ(Values(drawn), second);
}

TEST_F(FakeDeviceGraphTest, ScalarsStayWhatTheyWere) {
  const at::Tensor sum = Of({0});
  at::Tensor number = at::scalar_tensor(2.0F);
  ASSERT_OK(Capture([&] { sum.add_(number); }));
  number.fill_(100);
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(Values(sum), ElementsAre(2));
}

TEST_F(FakeDeviceGraphTest, TellsRacesOfReplays) {
  SideStream beside(FakeDevice::device());
  SideStream other(FakeDevice::device());
  const at::Tensor x = Of({1});
  ASSERT_OK(Capture([&] {
    beside.FollowCurrentStream();
    x.add_(1);
    {
      const SideStream::Scope scope(beside);
      x.mul_(3);
    }
    beside.BlockCurrentStream();
  }));
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(FakeDevice::Races(), Not(IsEmpty()));
  FakeDevice::Reset();
  // A replay also races with what comes before it on another stream.
  {
    const SideStream::Scope scope(other);
    x.zero_();
  }
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(FakeDevice::Races(),
              ::testing::Contains(HasSubstr("aten::zero_")));
}

TEST_F(FakeDeviceGraphTest, RefusesWhatCudaRefuses) {
  const at::Tensor x = Of({1});
  DeviceEvent before;
  before.Record(FakeDevice::device());
  SideStream beside(FakeDevice::device());
  DeviceEvent inside;

  const absl::Status reads = Capture([&] { EXPECT_ANY_THROW(x.sum().item()); });
  EXPECT_THAT(reads.message(), HasSubstr("_local_scalar_dense"));
  const absl::Status copies = Capture([&] { EXPECT_ANY_THROW(x.cpu()); });
  EXPECT_THAT(copies.message(), HasSubstr("copy to the host"));
  const absl::Status earlier =
      Capture([&] { EXPECT_ANY_THROW(before.BlockCurrentStream()); });
  EXPECT_THAT(earlier.message(), HasSubstr("before the capture"));
  const absl::Status asks = Capture([&] { EXPECT_ANY_THROW(before.Done()); });
  EXPECT_THAT(asks.message(), HasSubstr("whether an event is reached"));
  const absl::Status strange = Capture([&] {
    const SideStream::Scope scope(beside);
    EXPECT_ANY_THROW(x.add_(1));
  });
  EXPECT_THAT(strange.message(), HasSubstr("which is not captured"));
  const absl::Status unjoined = Capture([&] {
    beside.FollowCurrentStream();
    const SideStream::Scope scope(beside);
    x.add_(1);
  });
  EXPECT_THAT(unjoined.message(), HasSubstr("does not wait for stream"));
  // Nothing of all that has happened, and another capture is possible.
  EXPECT_THAT(Values(x), ElementsAre(1));
  ASSERT_OK(Capture([&] {
    x.add_(1);
    inside.Record(FakeDevice::device());
  }));
  EXPECT_ANY_THROW(inside.BlockCurrentStream());
  EXPECT_ANY_THROW(inside.Done());
  ASSERT_OK(graph_->Replay());
  EXPECT_THAT(Values(x), ElementsAre(2));
}

TEST_F(FakeDeviceGraphTest, MemoryThatIsFreedInACaptureIsLeftAlone) {
  const at::Tensor x = Of({1});
  auto written = std::make_unique<at::Tensor>(Of({1}));
  const absl::Status status = Capture([&] {
    written->add_(1);
    written.reset();
    EXPECT_ANY_THROW(x.cpu());
  });
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(Values(x), ElementsAre(1));
}

TEST_F(FakeDeviceGraphTest, IsNotReplayedOverMemoryThatIsGone) {
  at::Tensor x = Of({1});
  const at::Tensor y = Of({1});
  ASSERT_OK(Capture([&] { y.add_(x); }));
  ASSERT_OK(graph_->Replay());
  x.reset();
  EXPECT_THAT(graph_->Replay().message(), HasSubstr("are gone"));
}

TEST_F(FakeDeviceGraphTest, EqualCapturesHaveEqualOperations) {
  const at::Tensor x = Of({1});
  const at::Tensor y = Of({1});
  const auto of = [&](const at::Tensor& written) {
    graph_->Reset();
    EXPECT_OK(Capture([&] { written.add_(x * 2); }));
    return graph_->Operations();
  };
  const std::vector<std::string> first = of(y);
  EXPECT_THAT(first, Not(IsEmpty()));
  EXPECT_EQ(of(y), first);
  EXPECT_NE(of(x), first);
}

}  // namespace
}  // namespace fsdp::testing
