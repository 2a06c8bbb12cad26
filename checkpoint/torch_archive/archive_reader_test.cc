#include "checkpoint/torch_archive/archive_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
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
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Sample(absl::string_view name) {
  return testing::ReadWholeFile(
      absl::StrCat("checkpoint/torch_archive/testing/data/", name));
}

absl::StatusOr<Value> Read(absl::string_view file) {
  return ReadArchive(testing::ReadFrom(file), 0,
                     static_cast<int64_t>(file.size()));
}

template <typename T>
T Element(absl::string_view file, const ArchiveTensor& tensor, size_t i) {
  T element;
  const auto at = static_cast<size_t>(tensor.FirstByte()) + i * sizeof(T);
  file.substr(at, sizeof(T)).copy(reinterpret_cast<char*>(&element), sizeof(T));
  return element;
}

TEST(ArchiveReaderTest, TensorsOfAllSorts) {
  const std::string file = Sample("mixed.pt");
  ASSERT_OK_AND_ASSIGN(const Value value, Read(file));
  const ArchiveTensor& a = *value.Find("a")->tensor();
  EXPECT_EQ(a.dtype, Dtype::kF32);
  EXPECT_THAT(a.shape, ElementsAre(3));
  EXPECT_EQ(Element<float>(file, a, 2), 2);
  const ArchiveTensor& bf16 = *value.Find("bf16")->tensor();
  EXPECT_EQ(bf16.dtype, Dtype::kBF16);
  EXPECT_THAT(bf16.shape, IsEmpty());
  EXPECT_EQ(Element<uint16_t>(file, bf16, 0), 0x3f80);
  EXPECT_THAT(value.Find("empty")->tensor()->shape, ElementsAre(0, 3));
  const ArchiveTensor& i64 = *value.Find("i64")->tensor();
  EXPECT_EQ(Element<int64_t>(file, i64, 0), int64_t{1} << 40);
  EXPECT_EQ(Element<int64_t>(file, i64, 1), -1);
  EXPECT_EQ(value.Find("bool")->tensor()->dtype, Dtype::kBool);
  EXPECT_EQ(value.Find("f8")->tensor()->dtype, Dtype::kF8E4M3);
  EXPECT_EQ(value.Find("u16")->tensor()->dtype, Dtype::kU16);
  EXPECT_EQ(Element<double>(file, *value.Find("f64")->tensor(), 0), 0.5);
  EXPECT_TRUE(a.IsContiguous());
  EXPECT_FALSE(value.Find("ordered")->Find("t")->tensor()->IsContiguous());
}

TEST(ArchiveReaderTest, WhatIsNoTensor) {
  const std::string file = Sample("mixed.pt");
  ASSERT_OK_AND_ASSIGN(const Value value, Read(file));
  const auto& list = std::get<Value::List>(value.Find("list")->is).items;
  ASSERT_EQ(list.size(), 6u);
  EXPECT_EQ(std::get<int64_t>(list[0].is), 1);
  EXPECT_EQ(std::get<double>(list[1].is), 2.5);
  EXPECT_EQ(std::get<std::string>(list[2].is), "x");
  EXPECT_TRUE(std::holds_alternative<Value::None>(list[3].is));
  EXPECT_EQ(std::get<bool>(list[4].is), true);
  EXPECT_EQ(std::get<int64_t>(std::get<Value::Tuple>(list[5].is).items[1].is),
            -2);
  const auto& size = std::get<Value::Tuple>(value.Find("size")->is).items;
  EXPECT_EQ(std::get<int64_t>(size[1].is), 3);
  EXPECT_EQ(std::get<int64_t>(value.Find("big")->is), int64_t{1} << 40);
  EXPECT_EQ(value.Find("none"), nullptr);
}

TEST(ArchiveReaderTest, TensorsThatShareAStorage) {
  const std::string file = Sample("shared.pt");
  ASSERT_OK_AND_ASSIGN(const Value value, Read(file));
  const ArchiveTensor& whole = *value.Find("whole")->tensor();
  const ArchiveTensor& part = *value.Find("part")->tensor();
  const ArchiveTensor& column = *value.Find("column")->tensor();
  EXPECT_EQ(whole.storage, part.storage);
  EXPECT_EQ(part.FirstByte(), whole.FirstByte() + 16);
  EXPECT_EQ(Element<float>(file, part, 0), 4);
  EXPECT_TRUE(part.IsContiguous());
  EXPECT_FALSE(column.IsContiguous());
  EXPECT_THAT(column.strides, ElementsAre(4));
}

TEST(ArchiveReaderTest, ParametersAndStateDicts) {
  const std::string module = Sample("module.pt");
  ASSERT_OK_AND_ASSIGN(const Value value, Read(module));
  ASSERT_EQ(value.dict()->items.size(), 2u);
  EXPECT_EQ(Element<float>(module, *value.Find("weight")->tensor(), 5), 5);
  const std::string parameter = Sample("parameter.pt");
  ASSERT_OK_AND_ASSIGN(const Value one, Read(parameter));
  EXPECT_EQ(Element<float>(parameter, *one.tensor(), 1), 1);
  const std::string number = Sample("number.pt");
  EXPECT_EQ(std::get<double>(Read(number)->is), 0.25);
}

// As in a .distcp file.
TEST(ArchiveReaderTest, SomewhereInAFile) {
  const std::string sample = Sample("archive.pt");
  const std::string file = absl::StrCat(std::string(5003, 'x'), sample, "yyy");
  ASSERT_OK_AND_ASSIGN(const Value value,
                       ReadArchive(testing::ReadFrom(file), 5003,
                                   static_cast<int64_t>(sample.size())));
  EXPECT_EQ(Element<int32_t>(file, *value.tensor(), 5), 5);
  EXPECT_EQ(value.tensor()->dtype, Dtype::kI32);
}

TEST(ArchiveReaderTest, WhatIsNotRead) {
  const std::pair<absl::string_view, std::string> kCases[] = {
      {"refused_device.pt", "torch.device is not what a checkpoint needs"},
      {"refused_complex128.pt",
       "torch.ComplexDoubleStorage is not what a checkpoint needs"},
      {"refused_script.pt", "is code of TorchScript: save the module's"},
      {"refused_deflated.pt", "is compressed: write it again by torch.save()"},
  };
  for (const auto& [name, why] : kCases) {
    EXPECT_THAT(Read(Sample(name)).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  }
}

// Replaces the first `from` of data.pkl and elsewhere by as many bytes.
std::string With(std::string file, absl::string_view from,
                 absl::string_view to) {
  EXPECT_EQ(from.size(), to.size());
  const size_t at = file.find(std::string(from));
  EXPECT_NE(at, std::string::npos) << from;
  file.replace(at, to.size(), std::string(to));
  // The pickle's CRC is then that of none: 0 in the directory is not checked.
  const size_t entry = file.find("PK\x01\x02");
  file.replace(entry + 16, 4, 4, '\0');
  return file;
}

TEST(ArchiveReaderTest, ChangedFiles) {
  const std::string file = Sample("archive.pt");
  const std::pair<std::string, std::string> kCases[] = {
      {With(file, "K\x02K\x03\x86", "K\x02K\x04\x86"),
       "reaches element 6 of storage \"0\", which has 6"},
      {With(file, "IntStorage", "IntStorag_"), "torch.IntStorag_ is not"},
      {With(file, "cpuq\x04K\x06", "cpuq\x04K\x07"),
       "has 24 bytes, which are not 7 of 4 each"},
      {With(file, "QK", "NK"), "a storage that is none"},
      {With(file, "little", "biggie"), "has another CRC32 than was written"},
      {file.substr(0, file.size() - 1), "is it torn off?"},
      {file.substr(0, 10), "cannot be a zip"},
  };
  for (const auto& [bytes, why] : kCases) {
    EXPECT_THAT(Read(bytes).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  }
}

TEST(ArchiveReaderTest, ReadErrorsAreHandedOn) {
  const ReadAt fails = [](int64_t, absl::Span<char>) {
    return absl::UnavailableError("file.pt: EIO");
  };
  EXPECT_THAT(ReadArchive(fails, 0, 100).status(),
              StatusIs(absl::StatusCode::kUnavailable, "file.pt: EIO"));
}

}  // namespace
}  // namespace fsdp::checkpoint
