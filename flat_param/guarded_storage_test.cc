#include "flat_param/guarded_storage.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <memory>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "flat_param/testing/error_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::flat_param {
namespace {

using ::fsdp::flat_param::testing::ErrorText;
using ::testing::HasSubstr;

constexpr int64_t kRows = 4;
constexpr int64_t kColumns = 3;
constexpr int64_t kNumel = kRows * kColumns;
constexpr char kText[] = "parameter blocks.3.weight is not gathered";

// Returns a contiguous tensor over `storage`, which may be empty: no operator
// runs.
at::Tensor TensorOver(const GuardedStorage& storage, c10::IntArrayRef sizes) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage.storage()),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(at::kFloat));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// A parameter as a matrix over guarded storage.
struct Guarded {
  GuardedStorage storage{kNumel * static_cast<int64_t>(sizeof(float)),
                         c10::Device(c10::kCPU), kText};
  at::Tensor parameter = TensorOver(storage, {kRows, kColumns});
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

const Access kElementwise[] = {
    {"Mul", [](const at::Tensor& p) { p.mul(2); }},
    {"Add", [](const at::Tensor& p) { p.add(p); }},
    {"Negate", [](const at::Tensor& p) { p.neg(); }},
    {"Relu", [](const at::Tensor& p) { p.relu(); }},
    {"Where", [](const at::Tensor& p) { at::where(p > 0, p, -p); }},
    {"Compare", [](const at::Tensor& p) { p.eq(0); }},
    {"FusedMultiplyAdd", [](const at::Tensor& p) { p.addcmul(p, p); }},
};

const Access kReductions[] = {
    {"Sum", [](const at::Tensor& p) { p.sum(); }},
    {"Norm", [](const at::Tensor& p) { p.norm(); }},
    {"Max", [](const at::Tensor& p) { p.max(); }},
    {"Softmax", [](const at::Tensor& p) { p.softmax(0); }},
    {"Item", [](const at::Tensor& p) { p.select(0, 0).select(0, 0).item(); }},
    {"Equal",
     [](const at::Tensor& p) {
       p.equal(at::zeros({kRows, kColumns}));
     }},
    {"AllClose",
     [](const at::Tensor& p) {
       p.allclose(at::zeros({kRows, kColumns}));
     }},
};

const Access kCopies[] = {
    {"Clone", [](const at::Tensor& p) { p.clone(); }},
    {"DetachClone", [](const at::Tensor& p) { p.detach().clone(); }},
    {"CopyFrom",
     [](const at::Tensor& p) {
       at::empty({kRows, kColumns}).copy_(p);
     }},
    {"CopyTo", [](const at::Tensor& p) { p.copy_(at::ones({kColumns})); }},
    {"ToDtype", [](const at::Tensor& p) { p.to(at::kDouble); }},
    {"ToBFloat16", [](const at::Tensor& p) { p.to(at::kBFloat16); }},
    {"Contiguous", [](const at::Tensor& p) { p.t().contiguous(); }},
    {"Cat",
     [](const at::Tensor& p) {
       at::cat({p, p});
     }},
    {"Stack",
     [](const at::Tensor& p) {
       at::stack({p, p});
     }},
    {"Repeat",
     [](const at::Tensor& p) {
       p.repeat({2, 2});
     }},
    {"Print", Print},
    {"Pickle", [](const at::Tensor& p) { torch::jit::pickle_save(p); }},
};

const Access kPointers[] = {
    {"DataPtr", [](const at::Tensor& p) { p.data_ptr<float>(); }},
    {"UntypedDataPtr", [](const at::Tensor& p) { p.data_ptr(); }},
    {"ConstDataPtr", [](const at::Tensor& p) { p.const_data_ptr(); }},
    {"ConstFloatPtr", [](const at::Tensor& p) { p.const_data_ptr<float>(); }},
    {"MutableDataPtr", [](const at::Tensor& p) { p.mutable_data_ptr(); }},
    {"MutableFloatPtr",
     [](const at::Tensor& p) { p.mutable_data_ptr<float>(); }},
    {"StorageData", [](const at::Tensor& p) { p.storage().data(); }},
    {"Accessor", [](const at::Tensor& p) { p.accessor<float, 2>()[0][0]; }},
};

const Access kLayers[] = {
    {"MatMul",
     [](const at::Tensor& p) {
       at::ones({2, kRows}).matmul(p);
     }},
    {"TransposeMatMul",
     [](const at::Tensor& p) {
       p.t().mm(at::ones({kRows, 2}));
     }},
    {"BatchedMatMul",
     [](const at::Tensor& p) { p.unsqueeze(0).bmm(p.t().unsqueeze(0)); }},
    {"Linear",
     [](const at::Tensor& p) {
       at::linear(at::ones({2, kColumns}), p);
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
};

const Access kViews[] = {
    {"IndexSelect",
     [](const at::Tensor& p) { p.index_select(0, at::zeros({1}, at::kLong)); }},
    {"Index",
     [](const at::Tensor& p) { at::index(p, {at::zeros({1}, at::kLong)}); }},
    {"SelectAdd", [](const at::Tensor& p) { p.select(0, 1).add(1); }},
    {"ViewAdd", [](const at::Tensor& p) { p.view({-1}).add(1); }},
    {"StridedSum", [](const at::Tensor& p) { p.as_strided({2}, {2}).sum(); }},
};

const Access kInPlace[] = {
    {"AddInPlace", [](const at::Tensor& p) { p.add_(1); }},
    {"MulInPlace", [](const at::Tensor& p) { p.mul_(2); }},
    {"Fill", [](const at::Tensor& p) { p.fill_(1); }},
    {"Zero", [](const at::Tensor& p) { p.zero_(); }},
    {"Uniform", [](const at::Tensor& p) { p.uniform_(); }},
    {"Normal", [](const at::Tensor& p) { p.normal_(); }},
    {"MaskedFill",
     [](const at::Tensor& p) {
       p.masked_fill_(at::ones({kRows, kColumns}, at::kBool), 0);
     }},
};

class AccessTest : public ::testing::TestWithParam<Access> {};

TEST_P(AccessTest, ThrowsOurTextWhileEmptyAndWorksWhileFilled) {
  Guarded guarded;
  std::vector<float> first(kNumel, 1);
  std::vector<float> second(kNumel, 1);
  const auto access = [&] { GetParam().run(guarded.parameter); };
  EXPECT_THAT(ErrorText(access), HasSubstr(kText)) << "never filled";
  guarded.storage.Fill(first.data());
  EXPECT_EQ(ErrorText(access), "");
  guarded.storage.Empty();
  EXPECT_THAT(ErrorText(access), HasSubstr(kText)) << "emptied";
  guarded.storage.Fill(second.data());
  EXPECT_EQ(ErrorText(access), "") << "filled at another address";
}

std::string NameOf(const ::testing::TestParamInfo<Access>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Elementwise, AccessTest,
                         ::testing::ValuesIn(kElementwise), NameOf);
INSTANTIATE_TEST_SUITE_P(Reductions, AccessTest,
                         ::testing::ValuesIn(kReductions), NameOf);
INSTANTIATE_TEST_SUITE_P(Copies, AccessTest, ::testing::ValuesIn(kCopies),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Pointers, AccessTest, ::testing::ValuesIn(kPointers),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Layers, AccessTest, ::testing::ValuesIn(kLayers),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Views, AccessTest, ::testing::ValuesIn(kViews),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(InPlace, AccessTest, ::testing::ValuesIn(kInPlace),
                         NameOf);

TEST(GuardedStorageTest, IsEmptyAtFirstAndKeepsItsSize) {
  Guarded guarded;
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
}

TEST(GuardedStorageTest, FillAndEmptyChangeNeitherVersionNorShape) {
  Guarded guarded;
  const int64_t version = guarded.parameter._version();
  std::vector<float> memory(kNumel);
  guarded.storage.Fill(memory.data());
  guarded.storage.Empty();
  EXPECT_EQ(guarded.parameter._version(), version);
  EXPECT_EQ(guarded.parameter.sizes(), c10::IntArrayRef({kRows, kColumns}));
}

TEST(GuardedStorageTest, TensorsReadAndWriteTheFilledMemory) {
  Guarded guarded;
  std::vector<float> memory(kNumel, 2);
  guarded.storage.Fill(memory.data());
  EXPECT_EQ(guarded.parameter.sum().item<float>(), 2 * kNumel);
  guarded.parameter.fill_(3);
  EXPECT_THAT(memory, ::testing::Each(3));
}

TEST(GuardedStorageTest, ViewsMadeWhileEmptySeeTheNextFill) {
  Guarded guarded;
  const at::Tensor row = guarded.parameter.t().select(1, 1);
  const at::Tensor alias = guarded.parameter.detach().view({-1});
  EXPECT_THAT(ErrorText([&] { row.sum(); }), HasSubstr(kText));
  std::vector<float> memory(kNumel, 5);
  guarded.storage.Fill(memory.data());
  EXPECT_EQ(row.sum().item<float>(), 5 * kColumns);
  EXPECT_TRUE(alias.is_alias_of(guarded.parameter));
}

TEST(GuardedStorageTest, BackwardThroughASavedTensorNeedsItFilled) {
  Guarded guarded;
  std::vector<float> first(kNumel, 2);
  std::vector<float> second(kNumel, 7);
  guarded.storage.Fill(first.data());
  const at::Tensor x = at::ones({kRows, kColumns}).requires_grad_();
  const at::Tensor loss = (x * guarded.parameter).sum();
  guarded.storage.Empty();
  const auto backward = [&] {
    loss.backward(/*gradient=*/{}, /*retain_graph=*/true);
  };
  EXPECT_THAT(ErrorText(backward), HasSubstr(kText));
  EXPECT_FALSE(x.grad().defined());
  guarded.storage.Fill(second.data());
  EXPECT_EQ(ErrorText(backward), "");
  EXPECT_TRUE(x.grad().equal(at::full({kRows, kColumns}, 7)));
}

TEST(GuardedStorageTest, CannotBeResized) {
  std::vector<float> memory(kNumel);
  for (bool filled : {false, true}) {
    Guarded guarded;
    if (filled) guarded.storage.Fill(memory.data());
    const size_t bytes = guarded.storage.storage().nbytes();
    EXPECT_NE(ErrorText([&] { guarded.parameter.resize_({100}); }), "");
    EXPECT_EQ(guarded.storage.storage().nbytes(), bytes);
  }
}

TEST(GuardedStorageTest, TensorsOutliveItAndThrow) {
  auto guarded = std::make_unique<Guarded>();
  std::vector<float> memory(kNumel);
  guarded->storage.Fill(memory.data());
  const at::Tensor parameter = guarded->parameter;
  guarded.reset();
  EXPECT_THAT(ErrorText([&] { parameter.sum(); }), HasSubstr(kText));
  EXPECT_TRUE(IsGuarded(parameter.storage()));
}

TEST(GuardedStorageTest, OfNoBytesCanBeFilledAndEmptied) {
  GuardedStorage storage(0, c10::Device(c10::kCPU), kText);
  const at::Tensor empty = TensorOver(storage, {0});
  storage.Fill(nullptr);
  EXPECT_EQ(ErrorText([&] { empty.sum(); }), "");
  storage.Empty();
  EXPECT_FALSE(storage.filled());
}

TEST(GuardedStorageTest, IsToldFromOtherStorage) {
  Guarded guarded;
  EXPECT_TRUE(IsGuarded(guarded.storage.storage()));
  EXPECT_TRUE(IsGuarded(guarded.parameter.storage()));
  std::vector<float> memory(kNumel);
  guarded.storage.Fill(memory.data());
  EXPECT_TRUE(IsGuarded(guarded.parameter.storage()));
  EXPECT_FALSE(IsGuarded(at::ones({2}).storage()));
  EXPECT_FALSE(IsGuarded(guarded.parameter.clone().storage()));
  EXPECT_FALSE(IsGuarded(c10::Storage()));
}

TEST(GuardedStorageTest, ThisLibTorchPassesTheSelfCheck) {
  EXPECT_OK(CheckGuardedStorage());
}

TEST(GuardedStorageTest, ATagIsFoundFromViewsFilledOrNot) {
  const int tag = 0;
  float data[kNumel] = {};
  at::Tensor view;
  {
    Guarded guarded;
    view = guarded.parameter.t();
    EXPECT_EQ(TagOf(view.storage()), nullptr);
    guarded.storage.SetTag(&tag);
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_THAT(ErrorText([&] { view.sum(); }), HasSubstr(kText));
    guarded.storage.Fill(data);
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_EQ(view.sum().item<float>(), 0);
    guarded.storage.SetTag(nullptr);
    EXPECT_EQ(TagOf(view.storage()), nullptr);
    EXPECT_EQ(view.sum().item<float>(), 0);
    guarded.storage.SetTag(&tag);
    guarded.storage.Empty();
    EXPECT_EQ(TagOf(view.storage()), &tag);
    EXPECT_THAT(ErrorText([&] { view.sum(); }), HasSubstr(kText));
  }
  // The tag's owner may be gone with that of the storage.
  EXPECT_EQ(TagOf(view.storage()), nullptr);
  EXPECT_THAT(ErrorText([&] { view.sum(); }), HasSubstr(kText));
}

TEST(GuardedStorageTest, OtherStoragesHaveNoTag) {
  EXPECT_EQ(TagOf(at::ones({2}).storage()), nullptr);
  EXPECT_EQ(TagOf(c10::Storage()), nullptr);
  float data[2] = {};
  const at::Tensor blob = at::from_blob(
      data, {2}, /*deleter=*/[](void*) {}, at::kFloat);
  EXPECT_EQ(TagOf(blob.storage()), nullptr);
}

}  // namespace
}  // namespace fsdp::flat_param
