#include "examples/llama/model/rope_config.h"

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<RopeConfig> Parse(const std::string& text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  return ParseRopeConfig(json, /*max_position_embeddings=*/4096);
}

std::string Llama3(const std::string& more = "") {
  return absl::StrCat(
      R"("rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, )",
      R"("high_freq_factor": 4.0)", more);
}

TEST(RopeConfigTest, DefaultsAreThoseOfTransformers) {
  for (const char* text :
       {"{}", R"({"rope_scaling": null})", R"({"rope_parameters": {}})",
        R"({"rope_scaling": {"type": "default"}})"}) {
    ASSERT_OK_AND_ASSIGN(const RopeConfig rope, Parse(text));
    EXPECT_EQ(rope.theta, 10000) << text;
    EXPECT_FALSE(rope.scaling.has_value()) << text;
  }
}

TEST(RopeConfigTest, ThetaIsReadWhereEitherVersionHasIt) {
  for (const char* text : {R"({"rope_theta": 500000})",
                           R"({"rope_theta": 500000.0, "rope_scaling": null})",
                           R"({"rope_parameters": {"rope_theta": 500000.0}})",
                           R"({"rope_theta": 500000, "rope_parameters":
            {"rope_type": "default", "rope_theta": 500000.0}})"}) {
    ASSERT_OK_AND_ASSIGN(const RopeConfig rope, Parse(text));
    EXPECT_EQ(rope.theta, 500000) << text;
    EXPECT_FALSE(rope.scaling.has_value()) << text;
  }
}

TEST(RopeConfigTest, ReadsLlama3OfBothVersions) {
  const std::string inner =
      Llama3(R"(, "original_max_position_embeddings": 8192)");
  for (const std::string& text :
       {absl::StrCat(R"({"rope_theta": 3.0, "rope_scaling": {)", inner, "}}"),
        absl::StrCat(R"({"rope_parameters": {"rope_theta": 3.0, )", inner,
                     "}}"),
        absl::StrCat(R"({"rope_theta": 3.0, "rope_scaling": {)", inner,
                     R"(}, "rope_parameters": {)", inner, "}}")}) {
    ASSERT_OK_AND_ASSIGN(const RopeConfig rope, Parse(text));
    EXPECT_EQ(rope.theta, 3) << text;
    ASSERT_TRUE(rope.scaling.has_value()) << text;
    EXPECT_EQ(rope.scaling->factor, 8);
    EXPECT_EQ(rope.scaling->low, 1);
    EXPECT_EQ(rope.scaling->high, 4);
    EXPECT_EQ(rope.scaling->tokens, 8192);
  }
}

TEST(RopeConfigTest, TheOriginalLengthMayBeOutsideOrAbsent) {
  ASSERT_OK_AND_ASSIGN(
      const RopeConfig outside,
      Parse(absl::StrCat(R"({"original_max_position_embeddings": 512, )",
                         R"("rope_scaling": {)", Llama3(), "}}")));
  EXPECT_EQ(outside.scaling->tokens, 512);
  ASSERT_OK_AND_ASSIGN(
      const RopeConfig absent,
      Parse(absl::StrCat(R"({"rope_scaling": {)", Llama3(), "}}")));
  EXPECT_EQ(absent.scaling->tokens, 4096);
}

TEST(RopeConfigTest, RefusesOtherTypesAndParameters) {
  const auto is_refused = [](const std::string& part) {
    return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(part));
  };
  for (const char* type : {"longrope", "mrope"}) {
    EXPECT_THAT(
        Parse(absl::StrCat(R"({"rope_scaling": {"type": ")", type, "\"}}")),
        is_refused(
            absl::StrCat("rope_scaling.type is \"", type,
                         "\": default, linear, dynamic, yarn and llama3")));
    // The old name does not hide the new one.
    EXPECT_THAT(Parse(absl::StrCat(R"({"rope_parameters": {"rope_type": ")",
                                   type, R"(", "type": "default"}})")),
                is_refused("rope_parameters.rope_type"));
  }
  EXPECT_THAT(Parse(R"({"rope_scaling": {"partial_rotary_factor": 0.5}})"),
              is_refused("rope_scaling.partial_rotary_factor is 0.5: only 1"));
  EXPECT_OK(Parse(R"({"rope_scaling": {"partial_rotary_factor": 1.0}})"));
  EXPECT_THAT(Parse(R"({"rope_scaling": {"factor": 2.0}})"),
              is_refused("rope_scaling.factor is 2.0"));
  EXPECT_THAT(Parse(absl::StrCat(R"({"rope_scaling": {)",
                                 Llama3(R"(, "attention_factor": 1)"), "}}")),
              is_refused("attention_factor"));
  EXPECT_THAT(Parse(R"({"rope_parameters": {"full_attention": {}}})"),
              is_refused("full_attention"));
}

TEST(RopeConfigTest, TypesHaveTheirParametersAlone) {
  EXPECT_THAT(Parse(R"({"rope_scaling": {"type": "linear"}})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rope_scaling.factor is missing")));
  EXPECT_THAT(
      Parse(
          R"({"rope_scaling": {"type": "dynamic", "factor": 2, "mscale": 1}})"),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("mscale")));
  EXPECT_THAT(Parse(R"({"rope_scaling":
                        {"type": "yarn", "factor": 2, "beta_fast": 1}})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("above beta_slow, which is 1")));
}

TEST(RopeConfigTest, RefusesWhatContradictsItself) {
  const auto is_invalid = [](const std::string& part) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(part));
  };
  EXPECT_THAT(
      Parse(R"({"rope_theta": 2.0, "rope_parameters": {"rope_theta": 3.0}})"),
      is_invalid("rope_parameters.rope_theta is 3.0: outside it is 2"));
  EXPECT_THAT(Parse(absl::StrCat(R"({"rope_parameters": {"rope_theta": 3.0}, )",
                                 R"("rope_scaling": {)", Llama3(), "}}")),
              is_invalid("contradicts rope_scaling"));
  EXPECT_THAT(
      Parse(absl::StrCat(
          R"({"original_max_position_embeddings": 512, "rope_scaling": {)",
          Llama3(R"(, "original_max_position_embeddings": 8)"), "}}")),
      is_invalid("original_max_position_embeddings is 8: outside it is 512"));
}

TEST(RopeConfigTest, RefusesNumbersThatCannotBe) {
  const auto of = [](const std::string& name, const std::string& value) {
    std::string inner =
        Llama3(R"(, "rope_theta": 3.0, "original_max_position_embeddings": 8)");
    const size_t begin = inner.find(absl::StrCat("\"", name, "\": "));
    const size_t end = inner.find(',', begin);
    inner.replace(begin, end - begin, absl::StrCat("\"", name, "\": ", value));
    return Parse(absl::StrCat(R"({"rope_scaling": {)", inner, "}}"));
  };
  ASSERT_OK(of("factor", "2"));
  for (const char* name :
       {"rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings"}) {
    for (const char* value : {"0", "-1", "\"8\""}) {
      EXPECT_THAT(of(name, value),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr(name), HasSubstr(value))));
    }
  }
  EXPECT_THAT(of("high_freq_factor", "1.0"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("above low_freq_factor, which is 1")));
  EXPECT_THAT(Parse(R"({"rope_scaling": 3})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rope_scaling is 3: it has to be an object")));
}

}  // namespace
}  // namespace llama
