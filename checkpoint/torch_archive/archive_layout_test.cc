#include "checkpoint/torch_archive/archive_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/torch_archive/archive_reader.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Value Tensor(Dtype dtype, std::vector<int64_t> shape) {
  ArchiveTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return Value{std::move(tensor)};
}

Value Text(const std::string& text) { return Value{text}; }

// One of everything.
Value Mixed() {
  Value::Dict group;
  group.items.emplace_back(Text("lr"), Value{0.1});
  group.items.emplace_back(Text("step"), Value{int64_t{70000}});
  group.items.emplace_back(Text("betas"),
                           Value{Value::Tuple{{Value{0.9}, Value{0.95}}}});
  group.items.emplace_back(Text("fused"), Value{false});
  group.items.emplace_back(Text("foreach"), Value{});
  group.items.emplace_back(Text("params"),
                           Value{Value::List{{Text("w"), Text("b")}}});
  Value::Dict dict;
  dict.items.emplace_back(Text("w"), Tensor(Dtype::kF32, {3, 5}));
  dict.items.emplace_back(Text("scalar"), Tensor(Dtype::kBF16, {}));
  dict.items.emplace_back(Text("empty"), Tensor(Dtype::kI64, {7, 0}));
  dict.items.emplace_back(Text("f8"), Tensor(Dtype::kF8E4M3, {11}));
  dict.items.emplace_back(Text("group"), Value{std::move(group)});
  dict.items.emplace_back(Value{int64_t{0}}, Text("a key that is no text"));
  return Value{std::move(dict)};
}

std::vector<std::string> Payloads(const ArchiveLayout& layout) {
  std::vector<std::string> payloads;
  for (const ArchivePayload& place : layout.payloads()) {
    std::string bytes(static_cast<size_t>(place.bytes), 0);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<char>(payloads.size() * 16 + i);
    }
    payloads.push_back(std::move(bytes));
  }
  return payloads;
}

TEST(ArchiveLayoutTest, WhatIsWrittenIsRead) {
  for (const int64_t alignment : {64, 4096}) {
    ASSERT_OK_AND_ASSIGN(const ArchiveLayout layout,
                         ArchiveLayout::Create(Mixed(), alignment));
    const std::vector<std::string> payloads = Payloads(layout);
    const std::string file = testing::Assemble(layout, payloads);
    ASSERT_OK_AND_ASSIGN(const Value value,
                         ReadArchive(testing::ReadFrom(file), 0,
                                     static_cast<int64_t>(file.size())));
    const char* const names[] = {"w", "scalar", "empty", "f8"};
    for (size_t i = 0; i < 4; ++i) {
      const ArchiveTensor& tensor = *value.Find(names[i])->tensor();
      EXPECT_EQ(tensor.FirstByte(), layout.payloads()[i].offset);
      EXPECT_EQ(tensor.FirstByte() % alignment, 0);
      EXPECT_EQ(tensor.storage_bytes, layout.payloads()[i].bytes);
      EXPECT_TRUE(tensor.IsContiguous());
    }
    EXPECT_THAT(value.Find("w")->tensor()->shape, ElementsAre(3, 5));
    EXPECT_EQ(value.Find("f8")->tensor()->dtype, Dtype::kF8E4M3);
    const Value& group = *value.Find("group");
    EXPECT_EQ(std::get<double>(group.Find("lr")->is), 0.1);
    EXPECT_EQ(std::get<int64_t>(group.Find("step")->is), 70000);
    EXPECT_EQ(std::get<Value::List>(group.Find("params")->is).items.size(), 2u);
    EXPECT_EQ(std::get<Value::Tuple>(group.Find("betas")->is).items.size(), 2u);
    EXPECT_EQ(value.dict()->items.size(), 6u);
  }
}

// The bytes that torch 2.11 and zipfile have read
// (testing/read_with_torch.py).
TEST(ArchiveLayoutTest, TheBytesStayAsTheyAre) {
  ASSERT_OK_AND_ASSIGN(const ArchiveLayout layout,
                       ArchiveLayout::Create(Mixed()));
  const std::string file = testing::Assemble(layout, Payloads(layout));
  // Kept where a person wants to read it.
  if (const char* const path = std::getenv("FSDP_TORCH_ARCHIVE_SAMPLE")) {
    std::ofstream(path, std::ios::binary) << file;
  }
  EXPECT_EQ(file.size(), 2283u);
  EXPECT_EQ(Crc32(file), 893289380u);
}

// Entry by entry what torch.save() wrote, but for the pickle, whose memo is
// another, and an id at the end.
TEST(ArchiveLayoutTest, LiesAsTorchLaysItOut) {
  const std::string theirs = testing::ReadWholeFile(
      "checkpoint/torch_archive/testing/data/archive.pt");
  ASSERT_OK_AND_ASSIGN(const Value value,
                       ReadArchive(testing::ReadFrom(theirs), 0,
                                   static_cast<int64_t>(theirs.size())));
  const auto payload = static_cast<size_t>(value.tensor()->FirstByte());
  ASSERT_OK_AND_ASSIGN(const ArchiveLayout layout,
                       ArchiveLayout::Create(Tensor(Dtype::kI32, {2, 3})));
  const std::string ours =
      testing::Assemble(layout, {{theirs.substr(payload, 24)}});
  // From the first entry whose place does not depend on the pickle's size.
  const auto rest = [](const std::string& file) {
    const size_t begin = file.find("archive/.storage_alignment");
    const size_t version = file.find("archive/version");
    EXPECT_NE(begin, std::string::npos);
    EXPECT_NE(version, std::string::npos);
    const size_t descriptor = file.find("PK\x07\x08", version);
    return file.substr(begin, descriptor + 16 - begin);
  };
  EXPECT_EQ(rest(ours), rest(theirs));
}

TEST(ArchiveLayoutTest, FramesAndPayloadsFillTheZip) {
  Value::List tensors;
  for (const int64_t size : {0, 1, 2, 61, 1009}) {
    tensors.items.push_back(Tensor(Dtype::kU8, {size}));
  }
  ASSERT_OK_AND_ASSIGN(const ArchiveLayout layout,
                       ArchiveLayout::Create(Value{std::move(tensors)}, 4096));
  const std::vector<uint32_t> crcs(5);
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const ArchivePiece& piece : layout.Frame(crcs)) {
    parts.emplace_back(piece.offset, piece.bytes.size());
  }
  for (const ArchivePayload& payload : layout.payloads()) {
    parts.emplace_back(payload.offset, payload.bytes);
  }
  std::sort(parts.begin(), parts.end());
  int64_t at = 0;
  for (const auto& [offset, bytes] : parts) {
    EXPECT_EQ(offset, at);
    at = offset + bytes;
  }
  EXPECT_EQ(at, layout.bytes());
}

// Of a file that nobody has to hold: only its frame is there.
TEST(ArchiveLayoutTest, SizesOf64Bits) {
  constexpr int64_t kLarge = (int64_t{5} << 30) + 7;
  Value::List tensors;
  tensors.items.push_back(Tensor(Dtype::kU8, {kLarge}));
  tensors.items.push_back(Tensor(Dtype::kF32, {3}));
  tensors.items.push_back(Tensor(Dtype::kU8, {kLarge}));
  ASSERT_OK_AND_ASSIGN(const ArchiveLayout layout,
                       ArchiveLayout::Create(Value{std::move(tensors)}));
  const std::vector<uint32_t> crcs = {1, 2, 3};
  const std::vector<ArchivePiece> frame = layout.Frame(crcs);
  const ReadAt read = [&frame](int64_t offset, absl::Span<char> bytes) {
    std::fill(bytes.begin(), bytes.end(), '\0');
    for (const ArchivePiece& piece : frame) {
      for (size_t i = 0; i < piece.bytes.size(); ++i) {
        const int64_t at = piece.offset + static_cast<int64_t>(i) - offset;
        if (at >= 0 && at < static_cast<int64_t>(bytes.size())) {
          bytes[static_cast<size_t>(at)] = piece.bytes[i];
        }
      }
    }
    return absl::OkStatus();
  };
  ASSERT_OK_AND_ASSIGN(const Value value, ReadArchive(read, 0, layout.bytes()));
  const auto& items = std::get<Value::List>(value.is).items;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(items[i].tensor()->FirstByte(), layout.payloads()[i].offset);
  }
  EXPECT_GT(layout.bytes(), 2 * kLarge);
}

TEST(ArchiveLayoutTest, WhatCannotBeWritten) {
  EXPECT_THAT(ArchiveLayout::Create(Tensor(Dtype::kF4, {2})).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("PyTorch has no such dtype as F4")));
  EXPECT_THAT(ArchiveLayout::Create(Tensor(Dtype::kU8, {-1})).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a negative size")));
  Value deep;
  for (int i = 0; i < 100; ++i) {
    Value::List list;
    list.items.push_back(std::move(deep));
    deep = Value{std::move(list)};
  }
  EXPECT_THAT(ArchiveLayout::Create(deep).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more than 100 deep")));
  Value::List large;
  for (int i = 0; i < 3; ++i) {
    large.items.push_back(Tensor(Dtype::kU8, {int64_t{1} << 59}));
  }
  EXPECT_THAT(ArchiveLayout::Create(Value{std::move(large)}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2^60")));
}

}  // namespace
}  // namespace fsdp::checkpoint
