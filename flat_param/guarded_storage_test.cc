#include "flat_param/guarded_storage.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <memory>
#include <ostream>
#include <sstream>
#include <vector>

#include "base/tensor_over.h"
#include "base/testing/fake_device.h"
#include "base/torch_status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::flat_param::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::HasSubstr;

constexpr int64_t kRows = 4;
constexpr int64_t kColumns = 3;
constexpr int64_t kNumel = kRows * kColumns;
constexpr char kText[] = "parameter blocks.3.weight is not gathered";

// A parameter as a matrix over guarded storage.
struct Guarded {
  GuardedStorage storage{kNumel * static_cast<int64_t>(sizeof(float)),
                         c10::Device(c10::kCPU), kText};
  at::Tensor parameter = TensorOver(storage.storage(), 0, {kRows, kColumns},
                                    {kColumns, 1}, at::kFloat);
};

void Print(const at::Tensor& p) {
  std::ostringstream text;
  text << p;
}

struct Access {
  const char* name;
  void (*run)(const at::Tensor& p);
};

void PrintTo(const Access& access, std::ostream* os) { *os << access.name; }

// One for each way to memory that LibTorch's operators have.
const Access kAccesses[] = {
    {"Elementwise", [](const at::Tensor& p) { p.mul(2); }},
    {"Where", [](const at::Tensor& p) { at::where(p > 0, p, -p); }},
    {"Sum", [](const at::Tensor& p) { p.sum(); }},
    {"Softmax", [](const at::Tensor& p) { p.softmax(0); }},
    {"Item", [](const at::Tensor& p) { p.select(0, 0).select(0, 0).item(); }},
    {"Equal", [](const at::Tensor& p) { p.equal(at::zeros_like(p)); }},
    {"Clone", [](const at::Tensor& p) { p.detach().clone(); }},
    {"CopyTo", [](const at::Tensor& p) { p.copy_(at::ones({kColumns})); }},
    {"ToDtype", [](const at::Tensor& p) { p.to(at::kBFloat16); }},
    {"Contiguous", [](const at::Tensor& p) { p.t().contiguous(); }},
    {"Cat",
     [](const at::Tensor& p) {
       at::cat({p, p});
     }},
    {"Print", Print},
    {"Pickle", [](const at::Tensor& p) { torch::jit::pickle_save(p); }},
    {"DataPtr", [](const at::Tensor& p) { p.data_ptr<float>(); }},
    {"UntypedDataPtr", [](const at::Tensor& p) { p.data_ptr(); }},
    {"ConstDataPtr", [](const at::Tensor& p) { p.const_data_ptr(); }},
    {"MutableDataPtr", [](const at::Tensor& p) { p.mutable_data_ptr(); }},
    {"StorageData", [](const at::Tensor& p) { p.storage().data(); }},
    {"Accessor", [](const at::Tensor& p) { p.accessor<float, 2>()[0][0]; }},
    {"MatMul",
     [](const at::Tensor& p) {
       p.t().mm(at::ones({kRows, 2}));
     }},
    {"LinearBias",
     [](const at::Tensor& p) {
       at::linear(at::ones({2, kColumns}), at::ones({kRows, kColumns}),
                  p.flatten().narrow(0, 0, kRows));
     }},
    {"Embedding",
     [](const at::Tensor& p) { at::embedding(p, at::ones({2}, at::kLong)); }},
    {"LayerNorm",
     [](const at::Tensor& p) {
       at::layer_norm(at::ones({2, kColumns}), {kColumns}, p.select(0, 0),
                      p.select(0, 1));
     }},
    {"Convolution",
     [](const at::Tensor& p) {
       at::conv1d(at::ones({1, 1, 8}), p.unsqueeze(1));
     }},
    {"Attention",
     [](const at::Tensor& p) {
       const at::Tensor heads = p.view({1, 1, kRows, kColumns});
       at::scaled_dot_product_attention(heads, heads, heads);
     }},
    {"Index",
     [](const at::Tensor& p) { at::index(p, {at::zeros({1}, at::kLong)}); }},
    {"StridedSum", [](const at::Tensor& p) { p.as_strided({2}, {2}).sum(); }},
    {"AddInPlace", [](const at::Tensor& p) { p.add_(1); }},
    {"Fill", [](const at::Tensor& p) { p.fill_(1); }},
    {"Uniform", [](const at::Tensor& p) { p.uniform_(); }},
};

class AccessTest : public ::testing::TestWithParam<Access> {};

TEST_P(AccessTest, ThrowsOurTextWhileEmptyAndWorksWhileFilled) {
  Guarded guarded;
  std::vector<float> first(kNumel, 1);
  std::vector<float> second(kNumel, 1);
  const auto access = [&] { GetParam().run(guarded.parameter); };
  EXPECT_THAT(TorchToStatus("access", access).message(), HasSubstr(kText))
      << "never filled";
  guarded.storage.Fill(first.data());
  EXPECT_EQ(TorchToStatus("access", access).message(), "");
  guarded.storage.Empty();
  EXPECT_THAT(TorchToStatus("access", access).message(), HasSubstr(kText))
      << "emptied";
  guarded.storage.Fill(second.data());
  EXPECT_EQ(TorchToStatus("access", access).message(), "")
      << "filled at another address";
}

INSTANTIATE_TEST_SUITE_P(All, AccessTest, ::testing::ValuesIn(kAccesses),
                         [](const auto& info) { return info.param.name; });

class GuardedStorageTest : public ::testing::Test {
 protected:
  // Before the process's first backward.
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_F(GuardedStorageTest, IsEmptyAtFirstAndKeepsItsSizeAndVersion) {
  Guarded guarded;
  const int64_t version = guarded.parameter._version();
  EXPECT_FALSE(guarded.storage.filled());
  EXPECT_EQ(guarded.storage.bytes(), kNumel * 4);
  EXPECT_EQ(guarded.storage.storage().nbytes(),
            static_cast<size_t>(kNumel * 4));
  std::vector<float> memory(kNumel);
  guarded.storage.Fill(memory.data());
  EXPECT_TRUE(guarded.storage.filled());
  guarded.storage.Empty();
  EXPECT_FALSE(guarded.storage.filled());
  EXPECT_EQ(guarded.storage.storage().nbytes(),
            static_cast<size_t>(kNumel * 4));
  EXPECT_EQ(guarded.parameter._version(), version);
  EXPECT_EQ(guarded.parameter.sizes(), c10::IntArrayRef({kRows, kColumns}));
}

TEST_F(GuardedStorageTest, CannotBeResized) {
  std::vector<float> memory(kNumel);
  for (bool filled : {false, true}) {
    Guarded guarded;
    if (filled) guarded.storage.Fill(memory.data());
    const size_t bytes = guarded.storage.storage().nbytes();
    EXPECT_NE(TorchToStatus("access", [&] { guarded.parameter.resize_({100}); })
                  .message(),
              "");
    EXPECT_EQ(guarded.storage.storage().nbytes(), bytes);
  }
}

TEST_F(GuardedStorageTest, OfNoBytesCanBeFilledAndEmptied) {
  GuardedStorage storage(0, c10::Device(c10::kCPU), kText);
  const at::Tensor empty =
      TensorOver(storage.storage(), 0, {0}, {1}, at::kFloat);
  storage.Fill(nullptr);
  EXPECT_EQ(TorchToStatus("access", [&] { empty.sum(); }).message(), "");
  storage.Empty();
  EXPECT_FALSE(storage.filled());
}

TEST_F(GuardedStorageTest, IsToldFromOtherStorage) {
  Guarded guarded;
  EXPECT_TRUE(IsGuarded(guarded.storage.storage()));
  EXPECT_TRUE(IsGuarded(guarded.parameter.storage()));
  std::vector<float> memory(kNumel);
  guarded.storage.Fill(memory.data());
  EXPECT_TRUE(IsGuarded(guarded.parameter.storage()));
  EXPECT_FALSE(IsGuarded(at::ones({2}).storage()));
  EXPECT_EQ(TagOf(at::ones({2}).storage()), nullptr);
  EXPECT_EQ(TagOf(c10::Storage()), nullptr);
  EXPECT_FALSE(IsGuarded(guarded.parameter.clone().storage()));
  EXPECT_FALSE(IsGuarded(c10::Storage()));
}

TEST_F(GuardedStorageTest, ATagIsFoundFromViewsFilledOrNot) {
  const int tag = 0;
  float data[kNumel] = {};
  at::Tensor view;
  {
    Guarded guarded;
    view = guarded.parameter.t();
    EXPECT_EQ(TagOf(view.storage()), nullptr);
    guarded.storage.SetTag(&tag);
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_THAT(TorchToStatus("access", [&] { view.sum(); }).message(),
                HasSubstr(kText));
    guarded.storage.Fill(data);
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_EQ(view.sum().item<float>(), 0);
    guarded.storage.SetTag(nullptr);
    EXPECT_EQ(TagOf(view.storage()), nullptr);
    EXPECT_EQ(view.sum().item<float>(), 0);
    guarded.storage.SetTag(&tag);
    guarded.storage.Empty();
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_THAT(TorchToStatus("access", [&] { view.sum(); }).message(),
                HasSubstr(kText));
    guarded.storage.Fill(data);
  }
  // The tag's owner may be gone with that of the storage.
  EXPECT_TRUE(IsGuarded(view.storage()));
  EXPECT_EQ(TagOf(view.storage()), nullptr);
  EXPECT_THAT(TorchToStatus("access", [&] { view.sum(); }).message(),
              HasSubstr(kText));
}

TEST_F(GuardedStorageTest, OfADeviceFillsEmptiesAndStaysArmed) {
  FakeDevice::Reset();
  GuardedStorage guarded(kNumel * sizeof(float), FakeDevice::device(),
                         "not gathered");
  const at::Tensor parameter =
      TensorOver(guarded.storage(), 0, {4, 3}, {3, 1}, at::kFloat);
  const at::Tensor view = parameter.t();  // looks at no memory
  EXPECT_THROW(parameter.add(1), c10::Error);
  EXPECT_THROW(parameter.fill_(1), c10::Error);
  EXPECT_THROW(parameter.cpu(), c10::Error);

  const at::Tensor arena = at::ones({kNumel}, FakeDevice::device());
  guarded.Fill(arena.data_ptr());
  EXPECT_EQ(view.add(1).cpu().sum().item<float>(), 2 * kNumel);
  parameter.mul_(3);
  EXPECT_EQ(arena.cpu().sum().item<float>(), 3 * kNumel);

  guarded.Empty();
  EXPECT_THROW(view.sum(), c10::Error);
  EXPECT_EQ(view.sizes(), at::IntArrayRef({3, 4}));
}

}  // namespace

}  // namespace fsdp::flat_param::testing
