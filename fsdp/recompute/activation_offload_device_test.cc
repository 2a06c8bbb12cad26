// Offloads tensors of a device with streams: copies run beside computation,
// streams leave nothing unordered, and the host never waits for the device.
// Also with a store that fails, or a device that takes too long.
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>

#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::HostStore;
using ::fsdp::offload::ParamStore;
using ::fsdp::offload::testing::TemporaryFile;
using Regions = std::vector<std::unique_ptr<MovedArguments>>;

constexpr int64_t kElements = 1024;
constexpr int64_t kBytes = kElements * sizeof(float);
static_assert(kBytes == offload::kPageBytes);

at::Tensor OnCpu(int64_t first) {
  return at::arange(first, first + kElements, at::kFloat);
}
at::Tensor Numbers(int64_t first) {
  return OnCpu(first).to(FakeDevice::device());
}

// Reports the host's reads and writes of transfers to the fake device.
class WatchedStore : public offload::testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;

  absl::StatusOr<std::unique_ptr<offload::Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) override {
    FakeDevice::HostWrite(Over(out.data(), out.size()), "a store's read");
    return ForwardingStore::Read(region, offset, out);
  }
  absl::StatusOr<std::unique_ptr<offload::Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override {
    FakeDevice::HostRead(Over(in.data(), in.size()), "a store's write");
    return ForwardingStore::Write(region, offset, in);
  }

 private:
  static at::Tensor Over(const char* data, size_t bytes) {
    return at::from_blob(const_cast<char*>(data), {static_cast<int64_t>(bytes)},
                         at::TensorOptions(at::kByte));
  }
};

using Offload = std::shared_ptr<ActivationOffload>;

// Returns a store whose memory the device cannot copy, so that all is staged.
std::unique_ptr<ParamStore> Host(int64_t tensors) {
  return HostStore::Make(tensors * kBytes).value();
}

Offload Straight(int64_t tensors, const ActivationOffloadOptions& options) {
  return ActivationOffload::MakeInHostMemory(tensors * kBytes,
                                             FakeDevice::device(), options)
      .value();
}

struct Place {
  std::string name;
  std::function<Offload(int64_t, const ActivationOffloadOptions&)> make;
  bool straight = false;
};

std::vector<Place> Places() {
  using Options = const ActivationOffloadOptions&;
  return {
      {"Straight", Straight, true},
      {"Staged",
       [](int64_t tensors, Options options) {
         return Make(std::make_unique<WatchedStore>(Host(tensors)), options);
       }},
      {"PagesThatAreNotLocked",
       [](int64_t tensors, Options options) {
         return Make(Host(tensors), options);
       }},
      {"File", [](int64_t tensors, Options options) {
         return Make(
             std::make_unique<WatchedStore>(TemporaryFile(tensors * kBytes)),
             options);
       }}};
}

at::Tensor MoveIn(MovedArguments& moved) {
  auto tensors = moved.MoveIn();
  if (tensors.ok()) return tensors->at(0);
  ADD_FAILURE() << tensors.status();
  return at::Tensor();
}

class DeviceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
  void SetUp() override { FakeDevice::Reset(); }
  void TearDown() override { EXPECT_THAT(FakeDevice::Races(), IsEmpty()); }
};

class PlacesTest : public DeviceTest,
                   public ::testing::WithParamInterface<Place> {};

TEST_P(PlacesTest, MemoryGoesAndComesBackWithTheSameBits) {
  using View = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<View> views = {
      [](const at::Tensor& x) { return x; },
      [](const at::Tensor& x) {
        return x.view({32, 32}).t();
      },
      [](const at::Tensor& x) {
        return x.view({32, 32}).narrow(1, 3, 7);
      },
      [](const at::Tensor& x) { return x.narrow(0, 5, 613); },
      [](const at::Tensor& x) {
        return x.narrow(0, 1, 1).expand({3, 5});
      },
      [](const at::Tensor& x) { return x.to(at::kBFloat16); }};
  const auto offload =
      GetParam().make(static_cast<int64_t>(views.size()), SmallOptions());
  for (const View& view : views) {
    const at::Tensor expected = view(OnCpu(1));
    FakeDevice::Reset();
    const int64_t before = FakeDevice::bytes_in_use();
    at::Tensor tensor = view(Numbers(1));
    FakeDevice::Reset();
    const auto moved = MoveOne(*offload, std::move(tensor));
    ASSERT_NE(moved, nullptr);
    EXPECT_FALSE(tensor.defined());  // NOLINT(bugprone-use-after-move)
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (FakeDevice::bytes_in_use() > before) {
      ASSERT_LT(absl::Now(), deadline);
      offload->stats();
    }
    for (int round = 0; round < 2; ++round) {
      const at::Tensor back = MoveIn(*moved);
      EXPECT_EQ(back.sizes(), expected.sizes());
      EXPECT_EQ(back.strides(), expected.strides());
      EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
      EXPECT_TRUE(at::equal(back.cpu(), expected));
      FakeDevice::Reset();
    }
  }
  EXPECT_TRUE(StoreComesTo(*offload, 0));
  EXPECT_EQ(offload->stats().failed, 0);
}

// Each region multiplies by two; backward sums the regions' arguments, which
// are freed at once. The second step reuses all memory.
at::Tensor Train(ActivationOffload& offload, int regions, int steps) {
  at::Tensor sum = Numbers(0);
  for (int step = 0; step < steps; ++step) {
    at::Tensor x = Numbers(step);
    FakeDevice::Reset();
    Regions moved;
    for (int i = 0; i < regions; ++i) {
      at::Tensor y = x.mul(2);
      moved.push_back(MoveOne(offload, std::exchange(x, std::move(y))));
    }
    for (; !moved.empty(); moved.pop_back()) {
      sum = sum.add(MoveIn(*moved.back()));
      sum = sum.add(x.add(1).sub(1).mul(0));  // memory of others meanwhile
    }
    EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  }
  return sum;
}

at::Tensor SumOf(int regions, int steps) {
  at::Tensor sum = OnCpu(0);
  for (int step = 0; step < steps; ++step) {
    sum.add_(OnCpu(step), (1 << regions) - 1);
  }
  return sum;
}

TEST_P(PlacesTest, StreamsAreOrderedWhateverTheWindowAndTheRegionsAhead) {
  constexpr int kRegions = 7;
  for (const int64_t window : {int64_t{0}, kBytes, 3 * kBytes, 99 * kBytes}) {
    for (const int ahead : {0, 1, 3}) {
      SCOPED_TRACE(::testing::Message() << window << ", " << ahead);
      ActivationOffloadOptions options = SmallOptions();
      options.window_bytes = window;
      options.regions_ahead = ahead;
      // A file has no room for new tensors while it writes those that nobody
      // needs.
      const auto offload = GetParam().make(
          int64_t{GetParam().straight ? 1 : 3} * kRegions, options);
      const at::Tensor sum = Train(*offload, kRegions, /*steps=*/3);
      EXPECT_EQ(offload->stats().failed, 0);
      EXPECT_THAT(FakeDevice::Races(), IsEmpty());
      EXPECT_TRUE(at::equal(sum.cpu(), SumOf(kRegions, /*steps=*/3)));
      EXPECT_TRUE(StoreComesTo(*offload, 0));
    }
  }
}

TEST_P(PlacesTest, MemoryOfWhatIsAbandonedWaitsForItsCopy) {
  const auto offload = GetParam().make(3, SmallOptions());
  const int64_t before = FakeDevice::bytes_in_use();
  {
    const FakeDevice::Stall stall;
    Regions regions;
    for (int i = 0; i < 3; ++i) {
      regions.push_back(MoveOne(*offload, Numbers(i)));
    }
    regions.clear();
    EXPECT_EQ(offload->stats().stored_bytes, 0);
    EXPECT_EQ(FakeDevice::bytes_in_use(), before + 3 * kBytes);
  }
  EXPECT_EQ(offload->stats().tensors_out, 0);
  EXPECT_EQ(offload->stats().failed, 0);
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
}

TEST_P(PlacesTest, WhatIsStillOnTheDeviceIsFoundThere) {
  const auto offload = GetParam().make(1, SmallOptions());
  const FakeDevice::Stall stall;
  const at::Tensor tensor = Numbers(1);
  auto moved = MoveOne(*offload, tensor);
  EXPECT_TRUE(MoveIn(*moved).is_alias_of(tensor));
  EXPECT_EQ(offload->stats().found, 1);
  EXPECT_EQ(offload->stats().bytes_in, 0);
}

INSTANTIATE_TEST_SUITE_P(All, PlacesTest, ::testing::ValuesIn(Places()),
                         [](const auto& info) { return info.param.name; });

using StraightTest = DeviceTest;
using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::WithFaults;

// Runs two steps of a host that is far ahead: it sees nothing of the first.
TEST_F(StraightTest, AHostThatIsAheadWaitsForNothingAndMemoryIsBounded) {
  constexpr int kRegions = 12;
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = 2 * kBytes;
  const auto offload = Straight(kRegions, options);
  const int64_t before = FakeDevice::bytes_in_use();
  at::Tensor sum;
  {
    const FakeDevice::Stall stall;
    sum = Train(*offload, kRegions, /*steps=*/2);
    EXPECT_EQ(offload->stats().failed, 0);
    EXPECT_EQ(offload->stats().full, 0);
  }
  // The peak is the window, as much read ahead, and the tensors of Train().
  EXPECT_LE(FakeDevice::peak_bytes() - before, 12 * kBytes);
  EXPECT_TRUE(at::equal(sum.cpu(), SumOf(kRegions, /*steps=*/2)));
}

TEST_F(StraightTest, WhatAnotherStreamGetsIsUsedAndFreedInOrder) {
  const auto offload = Straight(2, SmallOptions());
  const auto first = MoveOne(*offload, Numbers(1));
  const auto second = MoveOne(*offload, Numbers(2));
  offload->stats();                         // finds both written
  const at::Tensor last = MoveIn(*second);  // and reads the first ahead
  SideStream side(FakeDevice::device());
  at::Tensor result;
  {
    const SideStream::Scope beside(side);
    result = MoveIn(*first).add(1);
  }
  const at::Tensor other = Numbers(7).add(last);
  side.BlockCurrentStream();
  EXPECT_TRUE(at::equal(result.add(other).cpu(), OnCpu(11).add(OnCpu(0), 2)));
}

// The memory was read ahead, and nobody waited for it.
TEST_F(StraightTest, MemoryOfTheStoreIsUsedAgainInOrder) {
  const auto offload = Straight(2, SmallOptions());
  Regions regions;
  regions.push_back(MoveOne(*offload, Numbers(1)));
  regions.push_back(MoveOne(*offload, Numbers(2)));
  offload->stats();  // finds both written
  const FakeDevice::Stall stall;
  const at::Tensor last = MoveIn(*regions[1]);
  regions.clear();
  for (int i = 3; i < 5; ++i) {
    regions.push_back(MoveOne(*offload, Numbers(i)));
    EXPECT_NE(regions.back(), nullptr);
  }
  EXPECT_TRUE(at::equal(last.cpu(), OnCpu(2)));
}

TEST_F(StraightTest, AnotherStreamReadsWhatIsStillBeingWrittenInOrder) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  const auto offload = Straight(2, options);
  SideStream side(FakeDevice::device());
  const FakeDevice::Stall stall;
  std::unique_ptr<MovedArguments> first;
  std::unique_ptr<MovedArguments> second;
  {
    const SideStream::Scope beside(side);
    first = MoveOne(*offload, Numbers(1));
    second = MoveOne(*offload, Numbers(2));  // the first leaves the device
  }
  EXPECT_TRUE(at::equal(MoveIn(*first).cpu(), OnCpu(1)));
  EXPECT_EQ(offload->stats().missed, 1);
}

TEST_F(StraightTest, TheHostWritesNotOverWhatTheDeviceStillReads) {
  ActivationOffloadOptions options = SmallOptions();
  options.timeout = absl::Milliseconds(1);
  const auto offload = Straight(1, options);
  at::Tensor on_cpu = OnCpu(3);
  {
    const FakeDevice::Stall stall;
    MoveOne(*offload, Numbers(1)).reset();
    EXPECT_EQ(offload->MoveOut({&on_cpu}, "a region"), nullptr);
    EXPECT_TRUE(at::equal(on_cpu, OnCpu(3)));
    EXPECT_EQ(offload->stats().failed, 1);
  }
  const auto moved = MoveOne(*offload, on_cpu);
  ASSERT_NE(moved, nullptr);
  EXPECT_TRUE(at::equal(MoveIn(*moved), OnCpu(3)));
}

TEST_F(StraightTest, IsForTheCpuMemoryLikeAnyOther) {
  ASSERT_OK_AND_ASSIGN(
      const auto offload,
      ActivationOffload::MakeInHostMemory(kBytes, at::kCPU, SmallOptions()));
  const auto moved = MoveOne(*offload, OnCpu(1));
  EXPECT_TRUE(at::equal(MoveIn(*moved), OnCpu(1)));
  EXPECT_EQ(offload->stats().bytes_in, kBytes);
}

void ExpectMovesIn(MovedArguments& moved, const at::Tensor& expected) {
  ASSERT_OK_AND_ASSIGN(const auto tensors, moved.MoveIn());
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_TRUE(at::equal(tensors[0].cpu(), expected));
  FakeDevice::Reset();
}

class FailingStoreTest : public DeviceTest,
                         public ::testing::WithParamInterface<Fault::Effect> {};

TEST_P(FailingStoreTest, WhatCannotBeWrittenStaysInMemoryOfTheHost) {
  const auto offload = Make(
      WithFaults(Host(8), {FaultOf(Fault::Operation::kWrite, GetParam(), 1)}));
  const int64_t before = FakeDevice::bytes_in_use();
  Regions regions;
  for (int i = 0; i < 3; ++i) {
    at::Tensor tensor = Numbers(i);
    FakeDevice::Reset();
    regions.push_back(MoveOne(*offload, std::move(tensor)));
    ASSERT_NE(regions.back(), nullptr);
  }
  EXPECT_EQ(offload->stats().failed, 1);
  EXPECT_EQ(offload->stats().tensors_out, 2);
  EXPECT_EQ(offload->stats().stored_bytes, 2 * kBytes);
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 2; i >= 0; --i) ExpectMovesIn(*regions[i], OnCpu(i));
  }
  regions.clear();
  EXPECT_EQ(offload->stats().stored_bytes, 0);
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
}

TEST_P(FailingStoreTest, WhatCannotBeReadIsAnErrorAndCanBeReadAgain) {
  const auto offload = Make(
      WithFaults(Host(8), {FaultOf(Fault::Operation::kRead, GetParam(), 0)}));
  const auto moved = MoveOne(*offload, Numbers(1));
  offload->stats();  // finds it written
  EXPECT_THAT(
      moved->MoveIn(),
      StatusIs(Code::kUnavailable,
               AllOf(HasSubstr("Float [1024] on privateuseone:0, back into "
                               "memory: read region"),
                     HasSubstr("injected failure"))));
  FakeDevice::Reset();
  ExpectMovesIn(*moved, OnCpu(1));
}

INSTANTIATE_TEST_SUITE_P(Effects, FailingStoreTest,
                         ::testing::Values(Fault::Effect::kRefuse,
                                           Fault::Effect::kFail,
                                           Fault::Effect::kShorten));

TEST_F(DeviceTest, ATensorStaysWhereTheDeviceIsTheWindowBehind) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  options.timeout = absl::Milliseconds(1);
  const auto offload = Make(Host(8), options);
  const at::Tensor first = Numbers(1);
  std::unique_ptr<MovedArguments> moved;
  {
    const FakeDevice::Stall stall;
    moved = MoveOne(*offload, first);
    for (int i = 1; i <= 3; ++i) {
      at::Tensor tensor = Numbers(2);
      EXPECT_EQ(offload->MoveOut({&tensor}, "a region"), nullptr);
      EXPECT_TRUE(tensor.defined());
      EXPECT_EQ(offload->stats().failed, i);
    }
    ASSERT_OK_AND_ASSIGN(const auto found, moved->MoveIn());
    EXPECT_TRUE(found[0].is_alias_of(first));
  }
  EXPECT_NE(MoveOne(*offload, Numbers(3)), nullptr);
  EXPECT_EQ(offload->stats().tensors_out, 2);
  EXPECT_EQ(offload->stats().failed, 3);
}

// The host must not overwrite what it has read before the device has copied it.
TEST_F(DeviceTest, AReadWaitsForTheWindowOfCopiesThatAreUnderWay) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  options.regions_ahead = 0;
  options.timeout = absl::Milliseconds(1);
  const auto offload = Make(Host(8), options);
  const auto first = MoveOne(*offload, Numbers(1));
  offload->stats();
  const auto second = MoveOne(*offload, Numbers(2));
  offload->stats();
  EXPECT_EQ(offload->stats().tensors_out, 2);
  {
    const FakeDevice::Stall stall;
    ASSERT_OK(second->MoveIn().status());
    EXPECT_THAT(first->MoveIn(),
                StatusIs(Code::kDeadlineExceeded,
                         AllOf(HasSubstr("read region 'activation 0 of"),
                               HasSubstr("privateuseone:0 has not come to the "
                                         "end of a copy in time"))));
  }
  FakeDevice::Reset();
  ExpectMovesIn(*first, OnCpu(1));
}

TEST_F(DeviceTest, WhatIsAbandonedWhileTheStoreWritesIsErasedAfterwards) {
  Fault slow = FaultOf(Fault::Operation::kWrite, Fault::Effect::kDelay, 0);
  slow.delay = absl::Milliseconds(20);
  const auto offload = Make(WithFaults(Host(8), {slow}));
  auto moved = MoveOne(*offload, Numbers(1));
  EXPECT_EQ(offload->stats().stored_bytes, kBytes);
  FakeDevice::Reset();
  // The tensor may be on the device again while the store still writes.
  ExpectMovesIn(*moved, OnCpu(1));
  moved.reset();
  EXPECT_TRUE(StoreComesTo(*offload, 0));
  EXPECT_EQ(offload->stats().failed, 0);
}

}  // namespace
}  // namespace fsdp::testing
