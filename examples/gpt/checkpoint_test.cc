#include "examples/gpt/checkpoint.h"

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/gpt/model.h"
#include "examples/gpt/options.h"
#include "examples/gpt/safetensors.h"
#include "examples/gpt/trainable_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr GptConfig kModel{/*vocab=*/13, /*dim=*/12, /*layers=*/2, /*heads=*/3,
                           /*seq=*/5};

class CheckpointTest : public ::testing::Test {
 protected:
  ~CheckpointTest() override { std::filesystem::remove(path_); }

  // Saves the model of `seed` from `ranks` ranks.
  absl::Status Save(int ranks, int seed, const std::string& path) {
    return RunAllRanks(ranks, [&](Communicator& communicator) -> absl::Status {
      Gpt model(kModel);
      InitializeParameters(*model, seed);
      const std::vector<TensorSpec> specs = ParameterSpecs(*model);
      const std::shared_ptr<Communicator> unowned(std::shared_ptr<void>(),
                                                  &communicator);
      FSDP_ASSIGN_OR_RETURN(std::unique_ptr<TrainableModel> sharded,
                            MakeSharded(std::move(model), unowned));
      return SaveParameters(path, specs, *sharded, communicator);
    });
  }

  const std::string path_ =
      absl::StrCat(::testing::TempDir(), "/checkpoint_test.", getpid());
};

TEST_F(CheckpointTest, AShardedModelIsSavedWholeAndUnderItsOwnNames) {
  ASSERT_OK(Save(/*ranks=*/3, /*seed=*/4, path_));
  Gpt expected(kModel), loaded(kModel);
  InitializeParameters(*expected, 4);
  ASSERT_OK(LoadParameters(path_, *loaded));
  const auto parameters = loaded->named_parameters();
  for (const auto& parameter : expected->named_parameters()) {
    EXPECT_TRUE(parameter.value().equal(parameters[parameter.key()]))
        << parameter.key();
  }
}

TEST_F(CheckpointTest, LoadingNamesWhatDoesNotFit) {
  ASSERT_OK(Save(/*ranks=*/1, /*seed=*/0, path_));
  GptConfig other = kModel;
  other.layers = 3;
  EXPECT_THAT(LoadParameters(path_, *Gpt(other)),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"blocks.2.")));
  other.layers = 1;
  EXPECT_THAT(LoadParameters(path_, *Gpt(other)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tensors that the model does not have")));
  other = kModel;
  other.vocab = 14;
  EXPECT_THAT(LoadParameters(path_, *Gpt(other)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"wte.weight\" is F32[13, 12]")));
}

TEST_F(CheckpointTest, AllRanksLearnThatTheFileCannotBeWritten) {
  EXPECT_THAT(Save(/*ranks=*/2, /*seed=*/0, "/no/such/folder/init"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such")));
}

}  // namespace
}  // namespace gpt
