#include "checkpoint/dcp/dcp_optimizer.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr char kFolder[] = "/theirs";

// A state dict, to be saved in kFolder.
struct StateDict {
  template <typename T>
  void Add(DcpPath path, Dtype dtype, std::vector<int64_t> shape, T element) {
    TensorInfo info{DcpName(path), dtype, std::move(shape)};
    std::string all;
    for (int64_t i = 0; i < *NumelOf(info); ++i) {
      all.append(reinterpret_cast<const char*>(&element), sizeof(element));
    }
    tensors.push_back({std::move(info), std::move(path)});
    bytes.push_back(std::move(all));
  }
  void AddValue(DcpPath path, Value value) {
    values.push_back({std::move(path), std::move(value)});
  }

  std::vector<DcpWriteTensor> tensors;
  std::vector<std::string> bytes;  // of tensors
  std::vector<DcpWriteValue> values;
};

void Save(const StateDict& dict, FileSystem& files,
          const std::function<void(DcpRankFile&)>& change = nullptr) {
  std::vector<DcpRange> ranges;
  ranges.reserve(dict.tensors.size());
  for (size_t i = 0; i < dict.tensors.size(); ++i) {
    ranges.push_back({static_cast<int>(i), 0, *NumelOf(dict.tensors[i].info)});
  }
  ASSERT_OK_AND_ASSIGN(DcpRankFile layout,
                       LayOutDcpFile(0, dict.tensors, ranges, dict.values));
  std::string file(static_cast<size_t>(layout.bytes), '\0');
  const auto put = [&file](int64_t offset, absl::string_view text) {
    file.replace(static_cast<size_t>(offset), text.size(), text);
  };
  for (const DcpFileValue& value : layout.values) {
    put(value.offset, value.bytes);
  }
  for (const DcpFileChunk& chunk : layout.chunks) {
    const auto index = static_cast<size_t>(chunk.tensor);
    put(chunk.payload, dict.bytes[index]);
    for (const ArchivePiece& piece :
         FrameDcpChunk(dict.tensors[index], chunk, Crc32(dict.bytes[index]))) {
      put(piece.offset, piece.bytes);
    }
  }
  if (change != nullptr) change(layout);
  ASSERT_OK_AND_ASSIGN(const std::string metadata,
                       DcpMetadataBytes(dict.tensors, dict.values, {layout}));
  ASSERT_OK(files.MakeFolder(kFolder));
  ASSERT_OK(ReplaceFile(files, JoinPath(kFolder, layout.name), file));
  ASSERT_OK(ReplaceFile(files, JoinPath(kFolder, kDcpMetadataFile), metadata));
}

absl::StatusOr<DcpOptimizer> Read(FileSystem& files) {
  const absl::StatusOr<DcpMetadata> metadata = ReadDcpFolder(files, kFolder);
  if (!metadata.ok()) return metadata.status();
  return ReadDcpOptimizer(files, kFolder, *metadata);
}

absl::StatusOr<DcpOptimizer> SaveAndRead(const StateDict& dict) {
  testing::SimulatedFileSystem files;
  Save(dict, files);
  return Read(files);
}

std::map<std::string, std::string> Texts(const DcpGroup& group) {
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : group.options) texts[key] = value.ToString();
  return texts;
}

Value Tuple(std::vector<Value> items) {
  return Value{Value::Tuple{std::move(items)}};
}
Value List(std::vector<Value> items) {
  return Value{Value::List{std::move(items)}};
}
Value Text(const std::string& text) { return Value{text}; }

// What torch.distributed.checkpoint wrote.
TEST(DcpOptimizerTest, OfPython) {
  testing::SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder(kFolder));
  const std::string from = "checkpoint/dcp/testing/data/plain/";
  ASSERT_OK(ReplaceFile(files, JoinPath(kFolder, kDcpMetadataFile),
                        testing::ReadWholeFile(from + "metadata")));
  ASSERT_OK(ReplaceFile(files, JoinPath(kFolder, "__0_0.distcp"),
                        testing::ReadWholeFile(from + "__0_0.distcp")));
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, Read(files));
  ASSERT_EQ(read.slots.size(), 1u);
  const StoredTensor* const state = read.slots.at("exp_avg").Find("w");
  ASSERT_NE(state, nullptr);
  EXPECT_THAT(state->info.shape, ElementsAre(3, 5));
  EXPECT_THAT(read.numbers,
              ElementsAre(Pair("w", ElementsAre(Pair("step", 7)))));
  ASSERT_EQ(read.groups.size(), 1u);
  EXPECT_FALSE(read.is_flattened);
  EXPECT_THAT(read.groups[0].names, ElementsAre("w"));
  EXPECT_THAT(Texts(read.groups[0]),
              ElementsAre(Pair("betas", "[0.9, 0.95]"), Pair("lr", "0.125")));
}

TEST(DcpOptimizerTest, NothingIsThere) {
  StateDict dict;
  dict.Add({"model", "state.w.exp_avg"}, Dtype::kF32, {2}, 1.0F);
  dict.Add({"optim"}, Dtype::kF32, {2}, 1.0F);
  dict.AddValue({"optim", "loss_scale"}, Value{1.0});
  dict.AddValue({"dataloader", "state.w.step"}, Text("anything"));
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, SaveAndRead(dict));
  EXPECT_THAT(read.slots, IsEmpty());
  EXPECT_THAT(read.numbers, IsEmpty());
  EXPECT_THAT(read.groups, IsEmpty());
}

TEST(DcpOptimizerTest, Flattened) {
  StateDict dict;
  dict.Add({"a.b"}, Dtype::kF32, {2}, 1.0F);
  dict.Add({"optimizer", "state.a.b.exp_avg"}, Dtype::kF32, {2}, 1.0F);
  dict.Add({"optimizer", "state.a.b.step"}, Dtype::kF32, {}, 16777216.0F);
  dict.AddValue({"optimizer", "param_groups.a.b.lr"}, Value{0.5});
  dict.AddValue({"optimizer", "param_groups.0.lr"}, Value{int64_t{2}});
  dict.AddValue({"optimizer", "param_groups.0.maximize"}, Value{false});
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, SaveAndRead(dict));
  EXPECT_NE(read.slots.at("exp_avg").Find("a.b"), nullptr);
  EXPECT_EQ(read.numbers.at("a.b").at("step"), 1 << 24);
  EXPECT_TRUE(read.is_flattened);
  ASSERT_EQ(read.groups.size(), 2u);
  EXPECT_THAT(read.groups[0].names, ElementsAre("0"));
  EXPECT_THAT(Texts(read.groups[0]),
              ElementsAre(Pair("lr", "2"), Pair("maximize", "false")));
  EXPECT_THAT(read.groups[1].names, ElementsAre("a.b"));
  EXPECT_THAT(Texts(read.groups[1]), ElementsAre(Pair("lr", "0.5")));
}

// As tensors, as Python's numbers, and as nothing.
TEST(DcpOptimizerTest, NumbersOfAllSorts) {
  StateDict dict;
  dict.Add({"optim", "state", "a", "step"}, Dtype::kI64, {1}, int64_t{5});
  dict.Add({"optim", "state", "b", "step"}, Dtype::kF64, {}, 6.0);
  dict.AddValue({"optim", "state", "c", "step"}, Value{int64_t{7}});
  dict.AddValue({"optim", "state", "d", "step"}, Value{8.0});
  dict.Add({"optim", "state", "e", "step"}, Dtype::kI32, {}, int32_t{9});
  dict.AddValue({"optim", "state", "d", "momentum_buffer"},
                Value{Value::None{}});
  dict.Add({"optim", "param_groups", 1, "lr"}, Dtype::kF32, {}, 0.5F);
  dict.AddValue({"optim", "param_groups", 0, "note"},
                List({Tuple({Value{true}, Value{Value::Dict{}}})}));
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, SaveAndRead(dict));
  std::map<std::string, int64_t> steps;
  for (const auto& [name, numbers] : read.numbers) {
    EXPECT_EQ(numbers.size(), 1u) << name;
    steps[name] = numbers.at("step");
  }
  EXPECT_THAT(steps, ElementsAre(Pair("a", 5), Pair("b", 6), Pair("c", 7),
                                 Pair("d", 8), Pair("e", 9)));
  EXPECT_THAT(read.slots, IsEmpty());
  ASSERT_EQ(read.groups.size(), 2u);
  EXPECT_THAT(Texts(read.groups[0]),
              ElementsAre(Pair("note", "[[true, \"a dict\"]]")));
  EXPECT_THAT(Texts(read.groups[1]), ElementsAre(Pair("lr", "0.5")));
}

// One value for all groups.
TEST(DcpOptimizerTest, GroupsOfPyTorchBefore24) {
  const auto pair = [](const std::string& key, Value value) {
    return std::pair<Value, Value>(Text(key), std::move(value));
  };
  StateDict dict;
  dict.AddValue(
      {"optim", "param_groups"},
      List({Value{Value::Dict{{pair("lr", Value{0.5}),
                               pair("betas", Tuple({Value{0.5}, Value{0.75}})),
                               pair("params", List({Text("w"), Text("b")}))}}},
            Value{Value::Dict{{pair("params", List({Text("c")})),
                               pair("lr", Value{0.25})}}}}));
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, SaveAndRead(dict));
  EXPECT_FALSE(read.is_flattened);
  ASSERT_EQ(read.groups.size(), 2u);
  EXPECT_THAT(read.groups[0].names, ElementsAre("w", "b"));
  EXPECT_THAT(Texts(read.groups[0]),
              ElementsAre(Pair("betas", "[0.5, 0.75]"), Pair("lr", "0.5")));
  EXPECT_THAT(read.groups[1].names, ElementsAre("c"));
  EXPECT_THAT(Texts(read.groups[1]), ElementsAre(Pair("lr", "0.25")));
}

// Whoever knows the optimizer refuses them by their names.
TEST(DcpOptimizerTest, NumbersThatAreNoCounts) {
  StateDict dict;
  dict.AddValue({"optim", "state", "w", "note"}, Text("x"));
  dict.AddValue({"optim", "state", "w", "mean"}, Value{0.5});
  ASSERT_OK_AND_ASSIGN(const DcpOptimizer read, SaveAndRead(dict));
  EXPECT_THAT(read.numbers.at("w"),
              ElementsAre(Pair("mean", 0), Pair("note", 0)));
}

TEST(DcpOptimizerTest, WhatIsRefused) {
  const DcpPath step = {"optim", "state", "w", "step"};
  const DcpPath groups = {"optim", "param_groups"};
  const DcpPath params = {"optim", "param_groups", 0, "params"};
  const struct {
    std::function<void(StateDict&)> make;
    const char* why;
  } cases[] = {
      {[&](StateDict& dict) { dict.Add(step, Dtype::kF32, {}, 1.5F); },
       "/theirs/__0_0.distcp: \"optim.state.w.step\": is no count"},
      {[&](StateDict& dict) { dict.Add(step, Dtype::kI64, {}, int64_t{-1}); },
       "is no count"},
      {[&](StateDict& dict) { dict.Add(step, Dtype::kF64, {}, 1e300); },
       "is no count"},
      {[&](StateDict& dict) { dict.AddValue(step, Text("1")); }, "is no count"},
      {[&](StateDict& dict) { dict.Add(step, Dtype::kF32, {2}, 1.0F); },
       "\"optim.state.w.step\": is no number but a tensor"},
      {[&](StateDict& dict) { dict.Add(step, Dtype::kU8, {}, '\1'); },
       "is a number of U8"},
      {[&](StateDict& dict) {
         dict.AddValue(params, List({Value{int64_t{0}}}));
       },
       "\"optim.param_groups.0.params\": is no list of names"},
      {[&](StateDict& dict) { dict.AddValue(params, Text("w")); },
       "is no list of names"},
      {[&](StateDict& dict) { dict.AddValue(groups, List({Text("w")})); },
       "\"optim.param_groups\": is no list of groups"},
      {[&](StateDict& dict) { dict.AddValue(groups, Text("w")); },
       "is no list of groups"},
      {[&](StateDict& dict) {
         dict.AddValue(groups,
                       List({Value{Value::Dict{{{Value{1.0}, Value{}}}}}}));
       },
       "has an option without a name"},
      {[&](StateDict& dict) { dict.Add(groups, Dtype::kF32, {}, 1.0F); },
       "is a tensor, not a list of groups"},
      {[&](StateDict& dict) {
         dict.Add(step, Dtype::kF32, {}, 1.0F);
         dict.Add({"optimizer", "state.w.step"}, Dtype::kF32, {}, 1.0F);
       },
       "has an optimizer in \"optim\" and another in \"optimizer\""},
      {[&](StateDict& dict) {
         dict.AddValue({"optim", "param_groups", 0, "lr"}, Value{1.0});
         dict.AddValue({"optim", "param_groups.w.lr"}, Value{1.0});
       },
       "both in a list and flattened"},
  };
  for (const auto& one : cases) {
    StateDict dict;
    one.make(dict);
    EXPECT_THAT(SaveAndRead(dict).status(),
                StatusIs(kInvalid, HasSubstr(one.why)));
  }
}

// What is kept is no more than there is, however often it is named.
TEST(DcpOptimizerTest, ValuesThatOverlapAreRefused) {
  StateDict dict;
  dict.AddValue({"optim", "param_groups", 0, "params"}, List({Text("w")}));
  dict.AddValue({"optim", "param_groups", 1, "params"}, List({Text("w")}));
  testing::SimulatedFileSystem files;
  Save(dict, files, [](DcpRankFile& layout) {
    layout.values[1].offset = layout.values[0].offset;
    layout.values[1].bytes = layout.values[0].bytes;
  });
  EXPECT_THAT(Read(files).status(),
              StatusIs(kInvalid, HasSubstr(": overlaps another value")));
}

TEST(DcpOptimizerTest, ADamagedFileIsRefused) {
  StateDict dict;
  dict.Add({"optim", "state", "w", "step"}, Dtype::kF32, {}, 1.0F);
  dict.AddValue({"optim", "param_groups", 0, "lr"}, Value{1.0});
  testing::SimulatedFileSystem files;
  Save(dict, files);
  ASSERT_OK_AND_ASSIGN(
      const auto file,
      files.OpenForWriting("/theirs/__0_0.distcp", Caching::kCached));
  ASSERT_OK_AND_ASSIGN(const int64_t size, file->Size());
  ASSERT_OK(file->SetSize(size - 1));
  EXPECT_THAT(
      Read(files).status(),
      StatusIs(kInvalid, HasSubstr("but \"optim.state.w.step\" is in ")));
  ASSERT_OK(file->PWrite(0, std::string(1000, 'x')));
  EXPECT_THAT(Read(files).status(),
              StatusIs(kInvalid, HasSubstr("\"optim.param_groups.0.lr\": ")));
}

}  // namespace
}  // namespace fsdp::checkpoint
