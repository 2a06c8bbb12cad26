#include "examples/llama/model/documents.h"

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(DocumentsTest, LengthsAndPositionsBeginAnewWithEachDocument) {
  const DocumentStarts starts = {0, 3, 4};
  EXPECT_THAT(DocumentLengths(starts, 9), ElementsAre(3, 1, 5));
  EXPECT_THAT(DocumentPositions(starts, 9),
              ElementsAre(0, 1, 2, 0, 0, 1, 2, 3, 4));
  EXPECT_THAT(DocumentPositions({}, 0), IsEmpty());
}

TEST(DocumentsTest, EveryRowBeginsWithADocument) {
  EXPECT_OK(CheckDocumentStarts({}, 2, 4));
  EXPECT_OK(CheckDocumentStarts({0, 4}, 2, 4));
  EXPECT_OK(CheckDocumentStarts({0, 1, 4, 7}, 2, 4));
  const auto refuses = [](const char* part) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(part));
  };
  EXPECT_THAT(CheckDocumentStarts({0, 3}, 2, 4),
              refuses("row 1 does not begin with a document: no start is 4"));
  EXPECT_THAT(CheckDocumentStarts({1, 4}, 2, 4), refuses("row 0"));
  EXPECT_THAT(CheckDocumentStarts({-1, 0, 4}, 2, 4), refuses("-1"));
  EXPECT_THAT(CheckDocumentStarts({0, 4, 4}, 2, 4), refuses("ascend"));
  EXPECT_THAT(CheckDocumentStarts({0, 4, 2}, 2, 4), refuses("at 4 and then"));
  EXPECT_THAT(CheckDocumentStarts({0, 4, 8}, 2, 4),
              refuses("at 8 of 2 rows of 4 tokens"));
}

}  // namespace
}  // namespace llama
