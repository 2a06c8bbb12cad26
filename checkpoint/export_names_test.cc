// Exports some tensors, by other names.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::EmptyFolder;
using ::fsdp::checkpoint::testing::NamesIn;
using ::fsdp::comm::Communicator;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ExportNamesTest : public ::testing::TestWithParam<int> {
 protected:
  // Exports a net with the values of seed 1 by as many ranks as the test has.
  absl::Status Export(const ExportOptions& options) {
    return comm::testing::RunAllRanks(
        GetParam(), [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto model,
                                FullyShard(MakeNet(5, 2, /*seed=*/1),
                                           fsdp::testing::Unowned(world),
                                           fsdp::testing::BlockUnits()));
          return ExportModel(root_ + "/m", *model, options);
        });
  }

  const std::string root_ =
      EmptyFolder(absl::StrCat("export_names_", GetParam()));
};

INSTANTIATE_TEST_SUITE_P(Ranks, ExportNamesTest, ::testing::Values(1, 2, 3));

std::optional<std::string> NameOfSome(const std::string& name) {
  if (!absl::StrContains(name, "fc.")) return std::nullopt;
  return "other." + name;
}

TEST_P(ExportNamesTest, SomeTensorsHaveOtherNamesAndTheRestIsLeftOut) {
  ExportOptions options;
  options.stem = "part";
  options.names = NameOfSome;
  ASSERT_OK(Export(options));
  EXPECT_THAT(NamesIn(root_ + "/m"), ElementsAre("part.safetensors"));
  const auto loaded = MakeNet(5, 2, /*seed=*/2);
  LoadModelOptions load;
  load.mapping = [](const std::string& name) -> std::optional<TensorRecipe> {
    const auto other = NameOfSome(name);
    if (!other.has_value()) return std::nullopt;
    return TensorRecipe::Of(*other);
  };
  ASSERT_OK(LoadModel(root_ + "/m/part.safetensors", *loaded, load));
  const auto exported = MakeNet(5, 2, /*seed=*/1)->named_parameters();
  const auto others = MakeNet(5, 2, /*seed=*/2)->named_parameters();
  for (const auto& item : loaded->named_parameters()) {
    const bool is_exported = NameOfSome(item.key()).has_value();
    const auto& expected = is_exported ? exported : others;
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  }
}

TEST_P(ExportNamesTest, WhatCannotBeIsRefused) {
  ExportOptions options;
  options.names = [](const std::string&) { return "same"; };
  EXPECT_THAT(Export(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("two tensors of the model have the name")));
  options.names = nullptr;
  options.stem = "../model";
  EXPECT_THAT(Export(options), StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("../model")));
  EXPECT_THAT(NamesIn(root_), ::testing::IsEmpty());
}

}  // namespace
}  // namespace fsdp::checkpoint
