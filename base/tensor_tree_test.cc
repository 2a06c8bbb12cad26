#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/module_forward.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace user {

enum class Mode { kTrain, kEvaluate };

struct Attention {
  at::Tensor weights;
  Mode mode = Mode::kTrain;
};
template <typename Visit>
void VisitTensors(Attention& attention, Visit visit) {
  visit(attention.weights);
}

// An output with parts that are trees themselves.
struct Output {
  at::Tensor logits;
  std::vector<Attention> attentions;
  std::optional<at::Tensor> loss;
};
template <typename Visit>
void VisitTensors(Output& output, Visit visit) {
  visit(output.logits);
  visit(output.attentions);
  visit(output.loss);
}

struct Opaque {};

// A kind of tensor, as holders of parameters are.
class NamedTensor : public at::Tensor {
 public:
  using at::Tensor::Tensor;
};

}  // namespace user

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

at::Tensor Tensor(int value) { return at::full({1}, value, at::kLong); }

// Returns the values of the tensors in `tree`; -1 for an undefined one.
template <typename T>
std::vector<int64_t> Values(T tree) {
  std::vector<int64_t> values;
  for (const at::Tensor* tensor : TensorsOf(tree)) {
    values.push_back(tensor->defined() ? tensor->item<int64_t>() : -1);
  }
  return values;
}

TEST(TensorTreeTest, ATensorOfAnyKindIsItsOwnTree) {
  at::Tensor tensor = Tensor(1);
  EXPECT_THAT(TensorsOf(tensor), ElementsAre(&tensor));
  EXPECT_THAT(Values(at::Tensor()), ElementsAre(-1));
  EXPECT_THAT(Values(user::NamedTensor(Tensor(4))), ElementsAre(4));
}

TEST(TensorTreeTest, NumbersStringsEnumsAndEmptyContainersHoldNone) {
  EXPECT_THAT(Values(1), IsEmpty());
  EXPECT_THAT(Values(1.5), IsEmpty());
  EXPECT_THAT(Values(true), IsEmpty());
  EXPECT_THAT(Values(std::string("text")), IsEmpty());
  EXPECT_THAT(Values(user::Mode::kEvaluate), IsEmpty());
  EXPECT_THAT(Values(std::nullopt), IsEmpty());
  EXPECT_THAT(Values(std::vector<bool>{true, false}), IsEmpty());
  EXPECT_THAT(Values(std::vector<int64_t>{1, 2}), IsEmpty());
  EXPECT_THAT(Values(std::tuple<>()), IsEmpty());
  EXPECT_THAT(Values(std::vector<at::Tensor>()), IsEmpty());
  EXPECT_THAT(Values(std::array<at::Tensor, 0>()), IsEmpty());
  EXPECT_THAT(Values(std::map<int, at::Tensor>()), IsEmpty());
}

TEST(TensorTreeTest, VisitsPairsTuplesArraysAndVectorsInOrder) {
  EXPECT_THAT(Values(std::make_pair(Tensor(1), Tensor(2))), ElementsAre(1, 2));
  EXPECT_THAT(Values(std::make_tuple(Tensor(3), 0.5, Tensor(1), Tensor(2))),
              ElementsAre(3, 1, 2));
  EXPECT_THAT(Values(std::array<at::Tensor, 2>{Tensor(2), Tensor(1)}),
              ElementsAre(2, 1));
  EXPECT_THAT(
      Values(std::vector<at::Tensor>{Tensor(7), at::Tensor(), Tensor(6)}),
      ElementsAre(7, -1, 6));
}

TEST(TensorTreeTest, VisitsMapsInOrderOfTheirKeysIfTheyHaveOne) {
  const std::map<std::string, at::Tensor> map = {
      {"b", Tensor(2)}, {"a", Tensor(1)}, {"c", Tensor(3)}};
  EXPECT_THAT(Values(map), ElementsAre(1, 2, 3));
  EXPECT_THAT(Values(std::unordered_map<std::string, at::Tensor>(map.begin(),
                                                                 map.end())),
              ::testing::UnorderedElementsAre(1, 2, 3));
}

TEST(TensorTreeTest, VisitsWhatIsNested) {
  using State = std::pair<at::Tensor, std::optional<at::Tensor>>;
  const std::tuple<at::Tensor, std::vector<State>, std::map<int, State>> tree =
      {Tensor(1),
       {{Tensor(2), std::nullopt}, {Tensor(3), Tensor(4)}},
       {{9, {Tensor(5), Tensor(6)}}}};
  EXPECT_THAT(Values(tree), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(TensorTreeTest, VisitsStructsOfUsersThroughVisitTensors) {
  user::Output output;
  output.logits = Tensor(1);
  output.attentions = {{Tensor(2)}, {Tensor(3)}};
  EXPECT_THAT(Values(output), ElementsAre(1, 2, 3));
  output.loss = Tensor(4);
  EXPECT_THAT(Values(output), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(Values(std::make_tuple(Tensor(0), output)),
              ElementsAre(0, 1, 2, 3, 4));
}

TEST(TensorTreeTest, VisitorReplacesTensorsInPlace) {
  user::Output output;
  output.logits = Tensor(1);
  output.attentions = {{Tensor(2)}};
  std::pair<user::Output, std::map<int, at::Tensor>> tree = {output,
                                                             {{0, Tensor(3)}}};
  auto increment = [](at::Tensor& tensor) { tensor = tensor.add(10); };
  ForEachTensor(tree, increment);
  EXPECT_THAT(Values(tree), ElementsAre(11, 12, 13));
  EXPECT_EQ(output.logits.item<int64_t>(), 1) << "of the copy";
}

TEST(TensorTreeTest, VisitorKeepsItsState) {
  struct Counter {
    int count = 0;
    void operator()(const at::Tensor&) { ++count; }
  };
  Counter counter;
  const std::vector<at::Tensor> tensors = {Tensor(1), Tensor(2)};
  ForEachTensor(tensors, counter);
  user::Output output;
  ForEachTensor(output, counter);
  EXPECT_EQ(counter.count, 3);
}

TEST(TensorTreeTest, TellsTypesItCannotSeeInto) {
  using tensor_tree_internal::HasVisitTensors;
  using tensor_tree_internal::HoldsNoTensor;
  EXPECT_TRUE((HasVisitTensors<user::Output>::value));
  EXPECT_FALSE((HasVisitTensors<user::Opaque>::value));
  EXPECT_FALSE(HoldsNoTensor<user::Opaque>::value);
  EXPECT_FALSE(HoldsNoTensor<at::Tensor*>::value);
}

}  // namespace
}  // namespace fsdp
