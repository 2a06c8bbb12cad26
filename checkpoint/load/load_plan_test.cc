#include "checkpoint/load/load_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Sizes = std::vector<int64_t>;

// A file of whole tensors, one behind the other.
class Tensors {
 public:
  Tensors() { file_ = catalog_.AddFile("model.safetensors", 1 << 20); }

  Tensors& Add(const std::string& name, Sizes shape,
               Dtype dtype = Dtype::kF32) {
    StoredTensor tensor{{name, dtype, shape}, {}};
    StoredBox box;
    box.offsets.assign(shape.size(), 0);
    box.sizes = shape;
    box.file = file_;
    box.offset = end_;
    tensor.boxes.push_back(box);
    end_ += *BytesOf(tensor.info);
    const absl::Status added = catalog_.AddTensor(std::move(tensor));
    EXPECT_TRUE(added.ok()) << added;
    return *this;
  }

  const Catalog& catalog() const { return catalog_; }

 private:
  Catalog catalog_;
  int file_ = 0;
  int64_t end_ = 100;
};

// Elements [begin, end) of a target.
TensorRange Target(const std::string& name, Sizes sizes, int64_t begin,
                   int64_t end) {
  TensorRange target;
  target.name = name;
  target.sizes = std::move(sizes);
  target.strides = RowMajorStrides(target.sizes);
  target.begin = begin;
  target.values = at::empty({end - begin});
  return target;
}

// The file's element (of 4 bytes from byte 100 on) for each element of the
// target's values; -1 for those that nothing fills.
std::vector<int64_t> Filled(const LoadPlan& plan, const TensorRange& target) {
  std::vector<int64_t> from(target.values.numel(), -1);
  for (const StraightRead& read : plan.straight) {
    for (int64_t i = 0; i < read.run.bytes / 4; ++i) {
      EXPECT_EQ(from[read.element + i], -1) << "filled twice";
      from[read.element + i] = (read.run.offset - 100) / 4 + i;
    }
  }
  return from;
}

std::vector<int64_t> Count(int64_t begin, int64_t end) {
  std::vector<int64_t> numbers;
  for (int64_t i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

TEST(LoadPlanTest, EveryRangeOfATensor) {
  const Tensors tensors = Tensors().Add("a", {3}).Add("w", {3, 2, 2});
  for (int64_t begin = 0; begin <= 12; ++begin) {
    for (int64_t end = begin; end <= 12; ++end) {
      const std::vector<TensorRange> targets = {
          Target("w", {3, 2, 2}, begin, end)};
      LoadPlanOptions options;
      options.strict = false;
      const auto plan = PlanLoad(tensors.catalog(), targets, options);
      ASSERT_OK(plan.status());
      EXPECT_EQ(Filled(*plan, targets[0]), Count(3 + begin, 3 + end));
      EXPECT_TRUE(plan->whole.empty());
    }
  }
}

// q, k and v one behind the other, and one of them out of the three.
TEST(LoadPlanTest, RowsOfSeveralTensorsCostNoMemory) {
  const Tensors tensors =
      Tensors().Add("v", {1, 4}).Add("q", {2, 4}).Add("k", {3, 4});
  LoadPlanOptions options;
  options.mapping = [](const std::string&) {
    TensorRecipe recipe = TensorRecipe::Of("q");
    recipe.pieces.push_back({"k", std::make_pair(int64_t{1}, int64_t{3})});
    recipe.pieces.push_back({"v"});
    return recipe;
  };
  options.strict = false;
  // v: 0 to 3, q: 4 to 11, k: 12 to 23, without its first row.
  std::vector<int64_t> whole = Count(4, 12);
  for (const int64_t i : Count(16, 24)) whole.push_back(i);
  for (const int64_t i : Count(0, 4)) whole.push_back(i);
  for (int64_t begin = 0; begin <= 20; ++begin) {
    for (int64_t end = begin; end <= 20; ++end) {
      const std::vector<TensorRange> targets = {
          Target("qkv", {5, 4}, begin, end)};
      const auto plan = PlanLoad(tensors.catalog(), targets, options);
      ASSERT_OK(plan.status());
      EXPECT_EQ(
          Filled(*plan, targets[0]),
          std::vector<int64_t>(whole.begin() + begin, whole.begin() + end));
    }
  }
}

// One of those that a file has in one tensor, and rows of it.
TEST(LoadPlanTest, ALayerOfSeveralCostsNoMemory) {
  const Tensors tensors = Tensors().Add("first", {1}).Add("all", {3, 4, 2});
  LoadPlanOptions options;
  options.mapping = [](const std::string& name) {
    TensorRecipe recipe = TensorRecipe::Of("all");
    recipe.pieces[0].layer = 1;
    if (name == "rows") recipe.pieces[0].rows = {1, 3};
    return recipe;
  };
  options.strict = false;
  // first: 0, layers: 1 to 8, 9 to 16, 17 to 24.
  for (int64_t begin = 0; begin <= 4; ++begin) {
    for (int64_t end = begin; end <= 4; ++end) {
      const std::vector<TensorRange> targets = {
          Target("whole", {4, 2}, begin, end),
          Target("rows", {2, 2}, begin, end)};
      const auto plan = PlanLoad(tensors.catalog(), targets, options);
      ASSERT_OK(plan.status());
      EXPECT_TRUE(plan->whole.empty());
      for (const int target : {0, 1}) {
        LoadPlan one;
        for (const StraightRead& read : plan->straight) {
          if (read.target == target) one.straight.push_back(read);
        }
        const int64_t first = target == 0 ? 9 : 11;
        EXPECT_EQ(Filled(one, targets[static_cast<size_t>(target)]),
                  Count(first + begin, first + end));
      }
    }
  }
}

TEST(LoadPlanTest, OtherRecipesNeedWholeTensors) {
  const Tensors tensors = Tensors().Add("a", {2, 3}).Add("b", {4, 3});
  LoadPlanOptions options;
  options.mapping = [](const std::string& name) {
    TensorRecipe recipe;
    if (name == "t") {
      recipe.pieces.push_back({"a", std::nullopt, /*transposed=*/true});
    } else {
      recipe.pieces.push_back({"a", std::nullopt, true});
      recipe.pieces.push_back({"b", std::nullopt, true});
      recipe.dim = 1;
    }
    return recipe;
  };
  const std::vector<TensorRange> targets = {Target("t", {3, 2}, 0, 2),
                                            Target("both", {3, 6}, 0, 0)};
  const auto plan = PlanLoad(tensors.catalog(), targets, options);
  ASSERT_OK(plan.status());
  EXPECT_TRUE(plan->straight.empty());
  ASSERT_EQ(plan->whole.size(), 2);
  EXPECT_EQ(plan->whole[1].pieces.size(), 2);
  EXPECT_TRUE(plan->whole[1].pieces[1].transposed);
  EXPECT_EQ(plan->whole[1].dim, 1);
}

TEST(LoadPlanTest, AnyNameOfATiedTensorWillDo) {
  const Tensors tensors = Tensors().Add("head", {2});
  const TensorRange target = Target("embed", {2}, 0, 2);
  EXPECT_FALSE(PlanLoad(tensors.catalog(), {target}, {}).ok());
  const std::map<std::string, std::string> aliases = {{"other", "embed"},
                                                      {"head", "embed"}};
  LoadPlanOptions options;
  options.aliases = &aliases;
  const auto plan = PlanLoad(tensors.catalog(), {target}, options);
  ASSERT_OK(plan.status());
  EXPECT_EQ(plan->straight.size(), 1);
  // Both names in the file: the second is none too many.
  const Tensors both = Tensors().Add("embed", {2}).Add("head", {2});
  EXPECT_OK(PlanLoad(both.catalog(), {target}, options).status());
}

TEST(LoadPlanTest, EverythingThatDoesNotFitIsListed) {
  const Tensors tensors = Tensors()
                              .Add("shape", {2, 3})
                              .Add("dtype", {2}, Dtype::kI64)
                              .Add("extra", {1})
                              .Add("fits", {1});
  const std::vector<TensorRange> targets = {
      Target("shape", {3, 2}, 0, 1), Target("dtype", {2}, 0, 2),
      Target("gone", {1}, 0, 1), Target("fits", {1}, 0, 1)};
  EXPECT_THAT(
      PlanLoad(tensors.catalog(), targets, {}).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("shape: shape [2, 3] instead of [3, 2]"),
                     HasSubstr("dtype: dtype I64 instead of a floating-point"),
                     HasSubstr("missing: gone"), HasSubstr("unexpected: extra"),
                     Not(HasSubstr("fits")))));
  // What is missing may keep its value; what has another shape may not.
  LoadPlanOptions options;
  options.strict = false;
  EXPECT_THAT(
      PlanLoad(tensors.catalog(), targets, options).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("shape: "), HasSubstr("dtype: "),
                     Not(HasSubstr("missing")), Not(HasSubstr("unexpected")))));
}

TEST(LoadPlanTest, OnlyFloatingPointIsCast) {
  struct Case {
    Dtype stored;
    c10::ScalarType wanted;
    std::string why;  // empty: it fits
  };
  const std::vector<Case> cases = {
      {Dtype::kBF16, c10::kDouble, ""},
      {Dtype::kF64, c10::kHalf, ""},
      {Dtype::kC64, c10::kComplexDouble, ""},
      {Dtype::kI64, c10::kLong, ""},
      {Dtype::kBool, c10::kBool, ""},
      {Dtype::kC64, c10::kFloat, "dtype C64 instead of a floating-point one"},
      {Dtype::kF32, c10::kComplexFloat, "dtype F32 instead of a complex one"},
      {Dtype::kF32, c10::kLong, "dtype F32 instead of I64"},
      {Dtype::kI64, c10::kChar, "dtype I64 instead of I8"},
      {Dtype::kI8, c10::kLong, "dtype I8 instead of I64"},
      {Dtype::kU8, c10::kBool, "dtype U8 instead of BOOL"},
      {Dtype::kBool, c10::kFloat, "dtype BOOL instead of a floating-point one"},
  };
  for (const Case& one : cases) {
    const Tensors tensors = Tensors().Add("a", {2}, one.stored);
    TensorRange target = Target("a", {2}, 0, 2);
    target.dtype = one.wanted;
    const auto plan = PlanLoad(tensors.catalog(), {target}, {});
    if (one.why.empty()) {
      EXPECT_OK(plan.status());
    } else {
      EXPECT_THAT(plan.status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr(one.why)));
    }
  }
}

TEST(LoadPlanTest, RecipesThatCannotBeAreNamed) {
  const Tensors tensors = Tensors().Add("a", {2, 3}).Add("b", {2, 4});
  const auto why = [&](const TensorRecipe& recipe) {
    LoadPlanOptions options;
    options.mapping = [recipe](const std::string&) { return recipe; };
    options.strict = false;
    return std::string(
        PlanLoad(tensors.catalog(), {Target("t", {4, 3}, 0, 1)}, options)
            .status()
            .message());
  };
  EXPECT_THAT(why({}), HasSubstr("without pieces"));
  EXPECT_THAT(why({{{"a"}, {"b"}}, 0}), HasSubstr("do not go together"));
  EXPECT_THAT(why({{{"a"}, {"a"}}, 7}), HasSubstr("do not go together"));
  EXPECT_THAT(why({{{"a", std::make_pair(int64_t{1}, int64_t{3})}}, 0}),
              HasSubstr("rows 1 to 3 of a"));
  for (const int64_t layer : {int64_t{-1}, int64_t{2}, INT64_MAX}) {
    EXPECT_THAT(why({{{"a", std::nullopt, false, layer}}, 0}),
                HasSubstr(absl::StrCat("layer ", layer, " of a, which is [2")));
  }
  EXPECT_THAT(
      why({{{"a", std::make_pair(int64_t{2}, int64_t{4}), false, 1}}, 0}),
      HasSubstr("rows 2 to 4 of a, which is [3]"));
  EXPECT_THAT(why({{{"a", std::nullopt, true, 1}}, 0}),
              HasSubstr("the transpose of a, which is [3]"));
  EXPECT_THAT(why({{{"a"}}, 0}), HasSubstr("shape [2, 3] instead of [4, 3]"));
}

// A mapping that names nothing leaves a tensor as it is.
TEST(LoadPlanTest, NoRecipeKeepsTheValue) {
  const Tensors tensors = Tensors().Add("a", {2});
  LoadPlanOptions options;
  options.mapping = [](const std::string& name) -> std::optional<TensorRecipe> {
    if (name == "kept") return std::nullopt;
    return TensorRecipe::Of(name);
  };
  const auto plan =
      PlanLoad(tensors.catalog(),
               {Target("a", {2}, 0, 2), Target("kept", {9}, 0, 9)}, options);
  ASSERT_OK(plan.status());
  ASSERT_EQ(plan->straight.size(), 1);
  EXPECT_EQ(plan->straight[0].target, 0);
}

// Rows of 3 numbers become rows of 5 bytes.
RowConversion ToBytes(int64_t rows) {
  RowConversion conversion;
  conversion.sizes = {rows, 3};
  conversion.convert = [](const at::Tensor& from) {
    return at::empty({from.size(0), 5}, at::kByte);
  };
  return conversion;
}

TensorRange BytesTarget(int64_t rows, int64_t begin, int64_t end) {
  TensorRange target = Target("bytes", {rows, 5}, begin, end);
  target.values = target.values.to(at::kByte);
  return target;
}

// Of two tensors behind each other, a few rows at a time: those, and no others,
// in which the range has bytes.
TEST(LoadPlanTest, ConvertedRowsAreThoseOfTheRange) {
  const Tensors tensors = Tensors().Add("top", {2, 3}).Add("rest", {5, 3});
  for (const int64_t rows_at_once : {1, 2, 3, 7}) {
    LoadPlanOptions options;
    options.converted_bytes = rows_at_once * 3 * 4 + 1;
    options.mapping = [](const std::string&) {
      TensorRecipe recipe = TensorRecipe::Of("top");
      recipe.pieces.push_back({"rest"});
      recipe.conversion = ToBytes(7);
      return recipe;
    };
    for (int64_t begin = 0; begin <= 35; ++begin) {
      for (int64_t end = begin; end <= 35; ++end) {
        const auto plan =
            PlanLoad(tensors.catalog(), {BytesTarget(7, begin, end)}, options);
        ASSERT_OK(plan.status());
        std::vector<int64_t> read;  // elements of the file
        for (const WholeRead& one : plan->whole) {
          EXPECT_EQ(one.first_row * 3,
                    read.empty() ? begin / 5 * 3 : read.back() + 1);
          int64_t rows = 0;
          for (const WholeRead::Piece& piece : one.pieces) {
            EXPECT_EQ(piece.shape[1], 3);
            rows += piece.shape[0];
            const int64_t first =
                piece.begin + (piece.tensor->info.name == "rest" ? 6 : 0);
            for (int64_t i = 0; i < piece.shape[0] * 3; ++i) {
              read.push_back(first + i);
            }
          }
          EXPECT_LE(rows, rows_at_once);
        }
        EXPECT_EQ(read, begin == end
                            ? std::vector<int64_t>()
                            : Count(begin / 5 * 3, ((end - 1) / 5 + 1) * 3));
        EXPECT_TRUE(plan->straight.empty());
      }
    }
  }
}

TEST(LoadPlanTest, WhatIsTransposedIsConvertedAsAWhole) {
  const Tensors tensors = Tensors().Add("t", {3, 4});
  LoadPlanOptions options;
  options.mapping = [](const std::string&) {
    TensorRecipe recipe = TensorRecipe::Of("t");
    recipe.pieces[0].transposed = true;
    recipe.conversion = ToBytes(4);
    return recipe;
  };
  const auto plan =
      PlanLoad(tensors.catalog(), {BytesTarget(4, 7, 9)}, options);
  ASSERT_OK(plan.status());
  ASSERT_EQ(plan->whole.size(), 1);
  EXPECT_TRUE(plan->whole[0].conversion.has_value());
}

TEST(LoadPlanTest, WhatCannotBeConvertedIsRefused) {
  const Tensors tensors =
      Tensors().Add("integers", {4, 3}, Dtype::kI32).Add("rows", {4, 3});
  const auto plan = [&](const std::string& name, int64_t rows,
                        const RowConversion& conversion) {
    LoadPlanOptions options;
    options.strict = false;
    options.mapping = [&](const std::string&) {
      TensorRecipe recipe = TensorRecipe::Of(name);
      recipe.conversion = conversion;
      return recipe;
    };
    return PlanLoad(tensors.catalog(), {BytesTarget(rows, 0, 5)}, options)
        .status();
  };
  const auto refuses = [](const std::string& text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_OK(plan("rows", 4, ToBytes(4)));
  EXPECT_THAT(plan("integers", 4, ToBytes(4)),
              refuses("bytes: dtype I32 instead of a floating-point one"));
  EXPECT_THAT(plan("rows", 4, ToBytes(5)),
              refuses("bytes: shape [4, 3] instead of [5, 3]"));
  EXPECT_THAT(plan("rows", 6, ToBytes(4)),
              refuses("rows of [4, 3] cannot become those of [6, 5]"));
}

}  // namespace
}  // namespace fsdp::checkpoint
