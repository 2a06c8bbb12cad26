#include "fsdp/recompute/packed_form.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <c10/core/InferenceMode.h>

#include <functional>

#include "base/testing/fake_device.h"
#include "flat_param/guarded_storage.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FakeDevice;

int64_t Address(const at::Tensor& tensor) {
  return static_cast<int64_t>(
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

// Returns every element's bytes in logical order.
std::string Bits(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  return std::string(static_cast<const char*>(dense.const_data_ptr()),
                     dense.nbytes());
}

struct Case {
  std::string name;
  std::function<at::Tensor()> make;
  int64_t bytes;
  bool copied = false;  // to pack it
};

at::Tensor Numbers(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::arange(1, c10::multiply_integers(sizes) + 1).to(dtype).view(sizes);
}

class PackedFormTest : public ::testing::TestWithParam<Case> {};

TEST_P(PackedFormTest, OtherMemoryWithTheBytesMakesTheSameTensor) {
  const at::Tensor tensor = GetParam().make();
  const std::optional<PackedForm> form = PackedForm::Of(tensor);
  ASSERT_TRUE(form.has_value());
  EXPECT_EQ(form->bytes(), GetParam().bytes);
  const at::Tensor packed = form->Pack(tensor);
  EXPECT_EQ(packed.is_alias_of(tensor), !GetParam().copied);
  const at::Tensor read = form->Allocate();
  ASSERT_EQ(form->BytesOf(read).nbytes(), static_cast<size_t>(form->bytes()));
  form->BytesOf(read).copy_(form->BytesOf(packed));
  for (const at::Tensor& from : {packed, read}) {
    const at::Tensor made = form->Unpack(from);
    EXPECT_EQ(made.sizes(), tensor.sizes());
    EXPECT_EQ(made.strides(), tensor.strides());
    EXPECT_EQ(made.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(made.device(), tensor.device());
    EXPECT_EQ(Address(made) % 64, Address(tensor) % 64);
    EXPECT_FALSE(made.requires_grad());
    EXPECT_FALSE(made.is_view());
    EXPECT_EQ(Bits(made), Bits(tensor));
    EXPECT_EQ(PackedForm::Of(made), form);
  }
}

TEST_P(PackedFormTest, DoesNotLeaveItsDevice) {
  FakeDevice::Register();
  // Makes the same elements of the same storage on the device.
  const at::Tensor on_cpu = GetParam().make().detach();
  const at::Tensor storage = at::empty({0}, on_cpu.options())
                                 .set_(on_cpu.storage())
                                 .to(FakeDevice::device());
  const at::Tensor tensor = storage.as_strided(on_cpu.sizes(), on_cpu.strides(),
                                               on_cpu.storage_offset());
  const std::optional<PackedForm> form = PackedForm::Of(tensor);
  ASSERT_TRUE(form.has_value());
  EXPECT_EQ(form->bytes(), GetParam().bytes);
  FakeDevice::Reset();
  const at::Tensor packed = form->Pack(tensor);
  EXPECT_EQ(packed.is_alias_of(tensor), !GetParam().copied);
  const at::Tensor read = form->Allocate();
  form->BytesOf(read).copy_(form->BytesOf(packed));
  const at::Tensor made = form->Unpack(read);
  EXPECT_THAT(FakeDevice::HostWaits(), ::testing::IsEmpty());
  EXPECT_EQ(PackedForm::Of(made), form);
  EXPECT_EQ(Bits(made.cpu()), Bits(on_cpu));
}

template <typename... Sizes>
at::Tensor Counted(Sizes... sizes) {
  return Numbers({sizes...});
}
template <typename... Sizes>
at::Tensor Expanded(const at::Tensor& tensor, Sizes... sizes) {
  return tensor.expand({sizes...});
}

std::vector<Case> Cases() {
  constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;
  return {
      {"One", [] { return Counted(1); }, 4},
      {"Scalar", [] { return Counted(1).squeeze(0); }, 4},
      {"Dense", [] { return Counted(2, 3, 5); }, 120},
      {"RequiresGrad", [] { return Counted(7).requires_grad_(); }, 28},
      {"Half", [] { return Numbers({7}, at::kHalf); }, 14},
      {"Double", [] { return Numbers({7}, at::kDouble); }, 56},
      {"Complex", [] { return Numbers({3}, at::kComplexDouble); }, 48},
      {"Bool", [] { return Numbers({3}, at::kBool); }, 3},
      {"Nan", [] { return Counted(3).log_().neg_().sqrt_(); }, 12},
      {"Transposed", [] { return Counted(2, 3, 5).transpose(0, 2); }, 120},
      {"ChannelsLast",
       [] { return Counted(2, 3, 5, 7).contiguous(kChannelsLast); }, 840},
      {"Rows", [] { return Counted(5, 3).narrow(0, 1, 2); }, 24},
      {"RowsAtAnOddAddress", [] { return Counted(11).narrow(0, 5, 3); }, 12},
      {"Columns", [] { return Counted(5, 3).narrow(1, 1, 2); }, 40, true},
      {"ColumnsOfATransposed", [] { return Counted(5, 3).t().narrow(1, 1, 2); },
       24},
      {"EverySecond", [] { return Counted(9).slice(0, 1, 9, 2); }, 16, true},
      {"Expanded", [] { return Expanded(Counted(3, 1), 3, 1000); }, 12},
      {"ExpandedInFront", [] { return Expanded(Counted(3), 2, 5, 3); }, 12},
      {"ExpandedScalar", [] { return Expanded(Counted(1), 4, 4); }, 4},
      {"ExpandedColumns",
       [] { return Expanded(Counted(3, 2).narrow(1, 1, 1), 3, 5); }, 12, true},
  };
}

INSTANTIATE_TEST_SUITE_P(Tensors, PackedFormTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST(AllocatedTest, PacksStartAtAPageUnlessTheTensorDoesNotStartAtALine) {
  const at::Tensor tensor = Numbers({4096});
  ASSERT_EQ(Address(tensor) % 64, 0);
  const auto aligned = PackedForm::Of(tensor);
  EXPECT_EQ(Address(aligned->Allocate()) % offload::kPageBytes, 0);
  const auto columns = PackedForm::Of(tensor.view({64, 64}).narrow(1, 3, 8));
  EXPECT_EQ(Address(columns->Allocate()) % offload::kPageBytes, 0);
  const auto odd = PackedForm::Of(tensor.narrow(0, 1, 100));
  EXPECT_EQ(Address(odd->Allocate()) % offload::kPageBytes, 4);
}

TEST(FormlessTest, TensorsThatAreMoreThanTheirBytesHaveNoForm) {
  const at::Tensor tensor = Numbers({2, 3});
  EXPECT_FALSE(PackedForm::Of(at::Tensor()).has_value());
  EXPECT_FALSE(PackedForm::Of(at::empty({0, 3})).has_value());
  EXPECT_FALSE(PackedForm::Of(tensor.to_sparse()).has_value());
  EXPECT_FALSE(PackedForm::Of(tensor.to_sparse_csr()).has_value());
  EXPECT_FALSE(PackedForm::Of(tensor.to(at::kMeta)).has_value());
  EXPECT_FALSE(PackedForm::Of(at::complex(tensor, tensor).conj()).has_value());
  EXPECT_FALSE(
      PackedForm::Of(at::quantize_per_tensor(tensor, 0.5, 0, at::kQInt8))
          .has_value());
  const c10::InferenceMode inference;
  EXPECT_FALSE(PackedForm::Of(Numbers({3})).has_value());
}

TEST(FormlessTest, TensorsWhoseElementsOverlapHaveNoForm) {
  const at::Tensor windows = Numbers({9}).unfold(0, 3, 1);
  ASSERT_EQ(windows.sizes(), (std::vector<int64_t>{7, 3}));
  EXPECT_FALSE(PackedForm::Of(windows).has_value());
  EXPECT_TRUE(PackedForm::Of(Numbers({9}).unfold(0, 3, 3)).has_value());
}

TEST(FormlessTest, MemoryOfShardedParametersHasNoForm) {
  flat_param::GuardedStorage guarded(24, c10::Device(c10::kCPU), "freed");
  float memory[6] = {};
  guarded.Fill(memory);
  const at::Tensor tensor = at::empty({0}).set_(guarded.storage(), 0, {6}, {1});
  const at::Tensor view = tensor.view({2, 3}).t();
  EXPECT_FALSE(PackedForm::Of(tensor).has_value());
  EXPECT_FALSE(PackedForm::Of(view).has_value());
  guarded.Empty();
  EXPECT_FALSE(PackedForm::Of(tensor).has_value());
  EXPECT_FALSE(PackedForm::Of(view).has_value());
}

TEST(ToStringTest, NamesDtypeSizesAndDevice) {
  EXPECT_EQ(PackedForm::Of(Numbers({2, 3}, at::kHalf))->ToString(),
            "Half [2, 3] on cpu");
}

}  // namespace
}  // namespace fsdp
