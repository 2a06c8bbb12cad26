// Plans of very many ranks and parameters, without their values.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/save/save_plan.h"
#include "flat_param/layout.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using flat_param::FlatLayout;
using flat_param::ParameterSpec;

constexpr int kRanks = 4096;

// Adds the parts of `unit` that `rank` has, without values.
void AddParts(const FlatLayout& unit, int rank, TensorGroup* group) {
  const auto options = at::TensorOptions().device(at::kMeta);
  for (int i = 0; i < unit.num_parameters(); ++i) {
    const ParameterSpec& parameter = unit.parameter(i);
    const flat_param::Slice part = unit.InParameter(i, rank);
    group->parts.push_back({parameter.name, parameter.sizes, parameter.strides,
                            part.begin, at::empty({part.numel()}, options)});
  }
}

// The parts of a large model that ranks save, without values: units
// of ten parameters each, sharded over all ranks, with two states of an
// optimizer.
class LargePlan {
 public:
  LargePlan(int parameters, int ranks) {
    constexpr int kInUnit = 10;
    for (int first = 0; first < parameters; first += kInUnit) {
      std::vector<ParameterSpec> specs;
      for (int i = first; i < first + kInUnit && i < parameters; ++i) {
        const int64_t columns = 37 + i % 11;
        specs.push_back(
            {absl::StrCat("layers.", first / kInUnit, ".part", i, ".weight"),
             {1024, columns},
             {columns, 1}});
      }
      absl::StatusOr<FlatLayout> layout =
          FlatLayout::Create(std::move(specs), sizeof(float), ranks);
      FSDP_CHECK(layout.ok());
      units_.push_back(*std::move(layout));
    }
  }

  // As PartsToWrite() has them.
  std::vector<TensorGroup> PartsOf(int rank) const {
    std::vector<TensorGroup> groups;
    for (const char* stem :
         {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq"}) {
      TensorGroup group;
      group.stem = stem;
      for (const FlatLayout& unit : units_) AddParts(unit, rank, &group);
      groups.push_back(std::move(group));
    }
    return groups;
  }

 private:
  std::vector<flat_param::FlatLayout> units_;
};

absl::StatusOr<SavePlan> PlanOf(const LargePlan& large, int rank) {
  const std::vector<TensorGroup> groups = large.PartsOf(rank);
  return PlanSave(groups, {{"config.json", "{}"}},
                  /*max_file_bytes=*/5'000'000'000);
}

// docs/guide/saving_and_loading.md has these numbers.
TEST(PlanTest, ThreeRanksWriteTheBytesThatTheGuideSays) {
  ASSERT_OK_AND_ASSIGN(const FlatLayout unit,
                       FlatLayout::Create({{"a", {10}, {1}}, {"b", {7}, {1}}},
                                          sizeof(float), /*world_size=*/3));
  const std::vector<std::pair<int64_t, int64_t>> expected[] = {
      {{4096, 4128}}, {{4128, 4136}, {4136, 4152}}, {{4152, 4164}}};
  for (int rank = 0; rank < 3; ++rank) {
    TensorGroup model;
    model.stem = "model";
    AddParts(unit, rank, &model);
    ASSERT_OK_AND_ASSIGN(
        const SavePlan plan,
        PlanSave({model}, {}, /*max_file_bytes=*/5'000'000'000));
    std::vector<std::pair<int64_t, int64_t>> written;
    for (const SaveRange& range : plan.ranges) {
      written.emplace_back(range.offset, range.offset + range.bytes);
    }
    EXPECT_EQ(written, expected[rank]) << rank;
  }
}

// Ranks agree, and rank 0 puts their reports together.
TEST(PlanTest, ReportsOfAllRanks) {
  const LargePlan large(/*parameters=*/200, kRanks);
  ASSERT_OK_AND_ASSIGN(const SavePlan first, PlanOf(large, 0));
  const std::vector<NamedSize> files(first.files.begin(), first.files.end());
  std::vector<Piece> pieces;
  const auto add = [&pieces](int64_t file, int64_t offset, int64_t bytes) {
    for (const int64_t end = offset + bytes; offset < end;) {
      const int64_t size =
          std::min(end - offset, kBlockBytes - offset % kBlockBytes);
      pieces.push_back({file, offset, size, /*crc32c=*/0});
      offset += size;
    }
  };
  for (size_t i = 0; i < files.size(); ++i) {
    add(static_cast<int64_t>(i), 0,
        static_cast<int64_t>(first.files[i].header.size()));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_OK_AND_ASSIGN(const SavePlan plan, PlanOf(large, rank));
    EXPECT_EQ(plan.text, first.text);
    for (const SaveRange& range : plan.ranges) {
      add(range.file, range.offset, range.bytes);
    }
  }
  // Each byte is written once.
  EXPECT_OK(CombinePieces(std::move(pieces), files));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
