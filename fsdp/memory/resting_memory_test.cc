#include "fsdp/memory/resting_memory.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "base/device_streams.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kNumel = 5;

// A place of bytes with another address at every use.
struct Elsewhere {
  std::vector<float> bytes = std::vector<float>(kNumel);
  std::unique_ptr<float[]> memory;
  std::vector<std::string> calls;
  absl::Status fails;
};

class FakePlace : public RestingPlace {
 public:
  explicit FakePlace(Elsewhere* elsewhere) : elsewhere_(elsewhere) {}

  void Prefetch() override { elsewhere_->calls.push_back("prefetch"); }
  absl::StatusOr<char*> Acquire(Use use) override {
    if (!elsewhere_->fails.ok()) return elsewhere_->fails;
    elsewhere_->calls.push_back(use == Use::kRead     ? "read"
                                : use == Use::kUpdate ? "update"
                                                      : "overwrite");
    changed_ = use != Use::kRead;
    elsewhere_->memory = std::make_unique<float[]>(kNumel);
    std::copy(elsewhere_->bytes.begin(), elsewhere_->bytes.end(),
              elsewhere_->memory.get());
    return reinterpret_cast<char*>(elsewhere_->memory.get());
  }
  void MarkChanged() override { changed_ = true; }
  void Release(const SharedEvent& /*used*/) override {
    elsewhere_->calls.push_back(changed_ ? "write" : "drop");
    if (changed_) {
      std::copy_n(elsewhere_->memory.get(), kNumel, elsewhere_->bytes.begin());
    }
    elsewhere_->memory.reset();
  }

 private:
  Elsewhere* const elsewhere_;
  bool changed_ = false;
};

class RestingMemoryTest : public ::testing::Test {
 protected:
  static std::shared_ptr<RestingMemory> Make(Elsewhere* elsewhere) {
    return std::make_shared<RestingMemory>(
        kNumel * sizeof(float), at::Device(at::kCPU), "it is away",
        std::make_unique<FakePlace>(elsewhere), nullptr, nullptr);
  }

  Elsewhere elsewhere_;
  std::shared_ptr<RestingMemory> memory_ = Make(&elsewhere_);
  at::Tensor tensor_ = memory_->AsTensor(at::kFloat);
};

TEST_F(RestingMemoryTest, ValuesComeAndGoAndTheTensorStays) {
  const at::Tensor slice = tensor_.narrow(0, 1, 2);
  {
    const Resident resident = Resident::Of(tensor_, Use::kUpdate).value();
    tensor_.fill_(3);
  }
  EXPECT_EQ(elsewhere_.bytes, std::vector<float>(kNumel, 3));
  elsewhere_.bytes[1] = 7;
  const Resident resident = Resident::Of(slice, Use::kRead).value();
  EXPECT_EQ(slice[0].item<float>(), 7);
  EXPECT_EQ(slice[1].item<float>(), 3);
}

TEST_F(RestingMemoryTest, AnAccessInBetweenSaysSo) {
  const absl::Status status = TorchToStatus("test", [&] { tensor_.clone(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("it is away"));
}

TEST_F(RestingMemoryTest, UsesNestAndTheStrongestCounts) {
  {
    const Resident outer = Resident::Of(tensor_, Use::kRead).value();
    {
      const Resident inner = Resident::Of(tensor_, Use::kUpdate).value();
      tensor_.fill_(2);
    }
    EXPECT_EQ(tensor_[0].item<float>(), 2);
  }
  EXPECT_THAT(elsewhere_.calls, ElementsAre("read", "write"));
  EXPECT_EQ(elsewhere_.bytes[4], 2);
}

TEST_F(RestingMemoryTest, AFailureLeavesItAway) {
  elsewhere_.fails = absl::UnavailableError("no disk");
  EXPECT_EQ(Resident::Of(tensor_, Use::kRead).status(), elsewhere_.fails);
  EXPECT_FALSE(TorchToStatus("test", [&] { tensor_.clone(); }).ok());
  elsewhere_.fails = absl::OkStatus();
  EXPECT_OK(Resident::Of(tensor_, Use::kRead).status());
}

TEST_F(RestingMemoryTest, OfSeveralTheFirstAreReleasedWhenOneFails) {
  Elsewhere other;
  other.fails = absl::UnavailableError("no disk");
  const std::shared_ptr<RestingMemory> second = Make(&other);
  EXPECT_FALSE(
      Resident::Of({tensor_, second->AsTensor(at::kFloat)}, Use::kRead).ok());
  EXPECT_THAT(elsewhere_.calls, ElementsAre("read", "drop"));
}

TEST_F(RestingMemoryTest, PrefetchIsPassedOnUnlessItIsThere) {
  PrefetchTensor(tensor_);
  const Resident resident = Resident::Of(tensor_, Use::kRead).value();
  PrefetchTensor(tensor_);
  EXPECT_THAT(elsewhere_.calls, ElementsAre("prefetch", "read"));
}

TEST_F(RestingMemoryTest, TensorsOutliveIt) {
  memory_.reset();
  EXPECT_EQ(RestingMemory::Of(tensor_), nullptr);
  EXPECT_OK(Resident::Of(tensor_, Use::kRead).status());
  EXPECT_FALSE(TorchToStatus("test", [&] { tensor_.clone(); }).ok());
}

TEST_F(RestingMemoryTest, IsKnownByItsTensorsOnly) {
  EXPECT_EQ(RestingMemory::Of(tensor_.narrow(0, 2, 2)), memory_.get());
  EXPECT_EQ(RestingMemory::Of(at::zeros({2})), nullptr);
  EXPECT_EQ(RestingMemory::Of(at::Tensor()), nullptr);
  EXPECT_FALSE(flat_param::IsGuarded(tensor_.storage()));
  EXPECT_TRUE(RestsElsewhere(tensor_));
  EXPECT_FALSE(RestsElsewhere(at::zeros({2})));
}

TEST(StayingMemoryTest, IsAlwaysThere) {
  const at::Tensor memory = at::full({kNumel}, 4.0f);
  const auto resting = std::make_shared<RestingMemory>(memory, nullptr);
  const at::Tensor tensor = resting->AsTensor(at::kFloat);
  EXPECT_TRUE(at::equal(tensor, memory));
  EXPECT_FALSE(RestsElsewhere(tensor));
  {
    const Resident resident = Resident::Of(tensor, Use::kUpdate).value();
    tensor.fill_(1);
  }
  EXPECT_EQ(memory[2].item<float>(), 1);
  EXPECT_EQ(tensor[2].item<float>(), 1);
}

}  // namespace
}  // namespace fsdp
