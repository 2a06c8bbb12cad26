#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/testing/numbered_rows.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(BatchTest, HasTheRowsThatAreAskedFor) {
  ASSERT_OK_AND_ASSIGN(const Batch batch,
                       ReadBatch(NumberedRows(4), {3, 0, 3}));
  EXPECT_EQ(batch.tokens.sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(batch.targets.sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(batch.tokens.scalar_type(), at::kLong);
  EXPECT_EQ(batch.targets.scalar_type(), at::kLong);
  EXPECT_THAT(ValuesOf(batch.tokens), ElementsAre(31, 32, 1, 2, 31, 32));
  EXPECT_THAT(ValuesOf(batch.targets), ElementsAre(32, 33, 2, 3, 32, 33));
  EXPECT_THAT(batch.documents,
              ElementsAre(ElementsAre(0, 1), IsEmpty(), ElementsAre(0, 1)));
}

TEST(BatchTest, WhatTheSourceLacksIsPadding) {
  ASSERT_OK_AND_ASSIGN(const Batch batch, ReadBatch(NumberedRows(2), {2, 1}));
  EXPECT_THAT(ValuesOf(batch.tokens), ElementsAre(kPadding, kPadding, 11, 12));
  EXPECT_THAT(ValuesOf(batch.targets),
              ElementsAre(kNoTarget, kNoTarget, 12, 13));
  EXPECT_THAT(batch.documents, ElementsAre(IsEmpty(), ElementsAre(0, 1)));
}

TEST(BatchTest, ErrorsAreTheSources) {
  NumberedRows rows(2);
  rows.set_fails(true);
  EXPECT_THAT(ReadBatch(rows, {0}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("damaged")));
}

TEST(BatchTest, RanksShareRowsEqually) {
  EXPECT_OK(CheckShare({1, 0, 1}));
  EXPECT_OK(CheckShare({6, 2, 3}));
  for (const BatchShare& share :
       {BatchShare{0, 0, 1}, BatchShare{-2, 0, 2}, BatchShare{5, 0, 2},
        BatchShare{1, 0, 2}, BatchShare{6, 3, 3}, BatchShare{6, -1, 3},
        BatchShare{6, 0, 0}}) {
    EXPECT_THAT(CheckShare(share),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(share.rows, " rows"))));
  }
  const BatchShare share = {6, 2, 3};
  EXPECT_EQ(share.own_rows(), 2);
  EXPECT_EQ(share.first_row(), 4);
}

}  // namespace
}  // namespace llama
