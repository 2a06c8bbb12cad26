#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "planner/simulator/model_shape.h"
#include "planner/tool/unit_file.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ModelsTest, AGptIsARootAndItsBlocks) {
  GptShape gpt;
  gpt.layers = 3;
  gpt.dim = 10;
  gpt.vocab = 7;
  gpt.seq = 5;
  gpt.batch = 2;
  ASSERT_OK_AND_ASSIGN(const ModelShape model, MakeGpt(gpt));
  ASSERT_EQ(model.units.size(), 4u);
  EXPECT_EQ(model.units[3].name, "blocks.2");
  EXPECT_EQ(model.units[3].parent, 0);
  EXPECT_EQ(model.units[3].parameters.size(), 12u);
  // Two norms, four linear layers with biases; embeddings, norm and head.
  const int64_t block = 2 * 20 + (30 + 10 + 40) * 10 + 10 * 40 + 30 + 10 + 50;
  EXPECT_EQ(model.num_elements(), 3 * block + 70 + 50 + 20 + 70);
  EXPECT_EQ(model.units[1].forward.flops,
            2.0 * 10 * 12 * 100 + 4.0 * 10 * 5 * 10);
  EXPECT_EQ(model.units[1].backward.flops, 2 * model.units[1].forward.flops);
  EXPECT_EQ(model.units[0].forward.flops, 2.0 * 10 * 70);
}

TEST(ModelsTest, RecomputingABlockIsAnotherForward) {
  GptShape gpt;
  gpt.recompute = true;
  ASSERT_OK_AND_ASSIGN(const ModelShape model, MakeGpt(gpt));
  EXPECT_EQ(model.units[1].backward.flops, 3 * model.units[1].forward.flops);
  EXPECT_EQ(model.units[0].backward.flops, 2 * model.units[0].forward.flops);
}

TEST(ModelsTest, AGptHasSizesThatFit) {
  const auto with = [](int64_t GptShape::*size, int64_t value) {
    GptShape gpt;
    gpt.*size = value;
    return MakeGpt(gpt);
  };
  EXPECT_OK(with(&GptShape::layers, 0));
  EXPECT_OK(with(&GptShape::dim, int64_t{1} << 20));
  EXPECT_THAT(with(&GptShape::layers, -1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layers -1: it has to be from 0")));
  EXPECT_THAT(with(&GptShape::dim, 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dim")));
  EXPECT_THAT(with(&GptShape::vocab, int64_t{1} << 40),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("vocab")));
}

TEST(UnitFileTest, ReadsUnits) {
  ASSERT_OK_AND_ASSIGN(const ModelShape model,
                       ParseUnits("# measured\n"
                                  "elements,name,parent,forward_ms,"
                                  "backward_flops,trainable\r\n"
                                  "\n"
                                  "0, root, , 0.5, ,\n"
                                  "100, encoder,, 1, 1e9, 0\n"
                                  "200, encoder.0, encoder, 2, 3, 1\n"
                                  "300, decoder, , , , \n",
                                  "units.csv"));
  ASSERT_EQ(model.units.size(), 4u);
  const std::vector<UnitShape>& units = model.units;
  EXPECT_EQ(units[0].parent, -1);
  EXPECT_TRUE(units[0].parameters.empty());
  EXPECT_EQ(units[0].forward.seconds, 0.5e-3);
  EXPECT_EQ(units[1].parent, 0);
  EXPECT_EQ(units[1].backward.flops, 1e9);
  EXPECT_FALSE(units[1].trainable);
  EXPECT_EQ(units[2].parent, 1);
  EXPECT_EQ(units[2].forward.seconds, 2e-3);
  EXPECT_EQ(units[3].parent, 0);
  EXPECT_TRUE(units[3].trainable);
  EXPECT_EQ(model.num_elements(), 600);
}

TEST(UnitFileTest, SaysWhichLineIsWrong) {
  const auto is_refused = [](const char* where, const char* what) {
    return StatusIs(absl::StatusCode::kInvalidArgument,
                    AllOf(HasSubstr(where), HasSubstr(what)));
  };
  const auto parse = [](const char* text) {
    return ParseUnits(text, "units.csv");
  };
  EXPECT_THAT(parse(""), is_refused("units.csv", "lists no units"));
  EXPECT_THAT(parse("name,elements\n"), is_refused("", "lists no units"));
  EXPECT_THAT(parse("name,size\n"),
              is_refused("units.csv:1", "\"size\" is no column"));
  EXPECT_THAT(parse("name,name\n"), is_refused(":1", "twice"));
  EXPECT_THAT(parse("name,forward_ms\n"),
              is_refused(":1", "no column \"elements\""));
  EXPECT_THAT(parse("name,elements\na\n"),
              is_refused(":2", "1 values for 2 columns"));
  EXPECT_THAT(parse("name,elements\n,1\n"), is_refused(":2", "no name"));
  for (const char* bad :
       {"-1", "x", "", "1.5", "99999999999999999999", "9000000000000000000"}) {
    EXPECT_THAT(parse((std::string("name,elements\na,") + bad).c_str()),
                is_refused(":2", "whole number"));
  }
  for (const char* bad : {"-1", "x", "inf", "nan"}) {
    EXPECT_THAT(
        parse((std::string("name,elements,forward_ms\na,1,") + bad).c_str()),
        is_refused(":2", "forward_ms is"));
  }
  EXPECT_THAT(parse("name,elements\na,1\nb,2\na,3\n"),
              is_refused(":4", "there is a unit \"a\" above"));
  EXPECT_THAT(parse("name,elements,parent\na,1,\nb,2,c\n"),
              is_refused(":3", "\"c\" is no unit above"));
  EXPECT_THAT(parse("name,elements,parent\na,1,a\n"),
              is_refused(":2", "no parent"));
}

}  // namespace
}  // namespace fsdp::simulator
