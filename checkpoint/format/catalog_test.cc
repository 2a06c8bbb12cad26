#include "checkpoint/format/catalog.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Shape = std::vector<int64_t>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Two files of 100 bytes, and a tensor.
absl::Status Add(StoredTensor tensor) {
  Catalog catalog;
  catalog.AddFile("a", 100);
  catalog.AddFile("b", 100);
  return catalog.AddTensor(std::move(tensor));
}

TEST(CatalogTest, TensorsThatCannotBeAreRefused) {
  const TensorInfo w{"w", Dtype::kF32, {4}};
  EXPECT_OK(Add({w, {{{{0}, {4}}, 1, 84}}}));
  EXPECT_OK(Add({w, {{{{2}, {2}}, 0, 0}, {{{0}, {2}}, 1, 92}}}));
  EXPECT_THAT(Add({w, {{{{0}, {4}}, 1, 85}}}),
              StatusIs(kInvalid,
                       HasSubstr("tensor \"w\", F32[4]: a piece of 16 bytes at "
                                 "byte 85 of b, which has 100")));
  EXPECT_THAT(Add({w, {{{{0}, {4}}, 1, -1}}}),
              StatusIs(kInvalid, HasSubstr("at byte -1")));
  EXPECT_THAT(Add({w, {{{{1}, {4}}, 0, 0}}}),
              StatusIs(kInvalid, HasSubstr("does not lie inside")));
  EXPECT_THAT(Add({w, {{{{0}, {3}}, 0, 0}}}),
              StatusIs(kInvalid, HasSubstr("element [3] is in none")));
  EXPECT_THAT(Add({w, {{{{0}, {3}}, 0, 0}, {{{2}, {2}}, 0, 0}}}),
              StatusIs(kInvalid, HasSubstr("element [2] is in 2")));
  EXPECT_THAT(Add({{"w", Dtype::kU8, Shape(65, 1)}, {}}),
              StatusIs(kInvalid, HasSubstr("has 65 dimensions")));
  EXPECT_THAT(Add({{"w", Dtype::kU8, {-1}}, {}}),
              StatusIs(kInvalid, HasSubstr("negative")));
  Catalog catalog;
  EXPECT_OK(catalog.AddTensor({{"w", Dtype::kU8, {0}}, {}}));
  EXPECT_THAT(catalog.AddTensor({{"w", Dtype::kU8, {0}}, {}}),
              StatusIs(kInvalid, HasSubstr("given twice")));
}

TEST(CatalogTest, SubByteElementsLieInOnePiece) {
  const TensorInfo packed{"w", Dtype::kF4, {4}};
  EXPECT_OK(Add({packed, {{{{0}, {4}}, 0, 98}}}));
  EXPECT_THAT(Add({packed, {{{{0}, {2}}, 0, 0}, {{{2}, {2}}, 0, 1}}}),
              StatusIs(kInvalid, HasSubstr("do not fill bytes, in pieces")));
  EXPECT_THAT(RunsOf({packed, {{{{0}, {4}}, 0, 98}}}, 0, 4),
              StatusIs(kInvalid, HasSubstr("cannot be read in ranges")));
}

// A tensor in random boxes at random places of files whose every byte is
// where it belongs to.
class RandomTensor {
 public:
  explicit RandomTensor(std::mt19937& random) : random_(random) {
    Shape shape(Below(5));
    for (int64_t& size : shape) size = 1 + Below(5);
    constexpr Dtype kDtypes[] = {Dtype::kU8, Dtype::kBF16, Dtype::kF64};
    tensor_.info = {"w", kDtypes[Below(3)], shape};
    std::vector<Box> boxes = {{Shape(shape.size(), 0), shape}};
    for (int cut = 0; cut < 6 && !shape.empty(); ++cut) Cut(boxes);
    std::shuffle(boxes.begin(), boxes.end(), random_);
    for (const Box& box : boxes) Place(box);
  }

  const StoredTensor& tensor() const { return tensor_; }
  const std::vector<std::vector<int64_t>>& files() const { return files_; }

 private:
  int64_t Below(int64_t limit) {
    return static_cast<int64_t>(random_() % limit);
  }

  void Cut(std::vector<Box>& boxes) {
    Box& box = boxes[Below(static_cast<int64_t>(boxes.size()))];
    const size_t dim = Below(static_cast<int64_t>(box.sizes.size()));
    if (box.sizes[dim] < 2) return;
    Box rest = box;
    box.sizes[dim] = 1 + Below(box.sizes[dim] - 1);
    rest.offsets[dim] += box.sizes[dim];
    rest.sizes[dim] -= box.sizes[dim];
    boxes.push_back(rest);
  }

  // Appends the box's bytes, as numbers of bytes of the tensor, to a file.
  void Place(const Box& box) {
    const int64_t file = Below(2);
    if (Below(2) == 0) files_[file].push_back(-1);
    tensor_.boxes.push_back({box, static_cast<int>(file),
                             static_cast<int64_t>(files_[file].size())});
    const int64_t item = ItemBytes(tensor_.info.dtype);
    Append(box, 0, 0, item, files_[file]);
  }

  // The elements of the box in dimensions from `dim` on, one by one.
  void Append(const Box& box, size_t dim, int64_t index, int64_t item,
              std::vector<int64_t>& file) {
    if (dim == box.sizes.size()) {
      for (int64_t i = 0; i < item; ++i) file.push_back(index * item + i);
      return;
    }
    for (int64_t i = 0; i < box.sizes[dim]; ++i) {
      Append(box, dim + 1,
             index * tensor_.info.shape[dim] + box.offsets[dim] + i, item,
             file);
    }
  }

  std::mt19937& random_;
  StoredTensor tensor_;
  std::vector<std::vector<int64_t>> files_{2};
};

TEST(RunsTest, EveryRangeIsReadInOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 400; ++round) {
    const RandomTensor made(random);
    Catalog catalog;
    for (const auto& file : made.files()) {
      catalog.AddFile(absl::StrCat(catalog.files().size()),
                      static_cast<int64_t>(file.size()));
    }
    ASSERT_OK(catalog.AddTensor(made.tensor()));
    const StoredTensor& tensor = *catalog.Find("w");
    const int64_t item = ItemBytes(tensor.info.dtype);
    const int64_t numel = *NumelOf(tensor.info);
    for (int i = 0; i < 20; ++i) {
      auto begin = static_cast<int64_t>(random() % (numel + 1));
      auto end = static_cast<int64_t>(random() % (numel + 1));
      if (begin > end) std::swap(begin, end);
      ASSERT_OK_AND_ASSIGN(auto runs, RunsOf(tensor, begin, end));
      int64_t next = 0;
      for (size_t k = 0; k < runs.size(); ++k) {
        const FileRun& run = runs[k];
        ASSERT_EQ(run.target, next);
        for (int64_t byte = 0; byte < run.bytes; ++byte) {
          ASSERT_EQ(made.files()[run.file].at(run.offset + byte),
                    begin * item + next + byte);
        }
        next += run.bytes;
        const bool joins = k > 0 && runs[k - 1].file == run.file &&
                           runs[k - 1].offset + runs[k - 1].bytes == run.offset;
        ASSERT_FALSE(joins);
      }
      ASSERT_EQ(next, (end - begin) * item);
    }
    EXPECT_THAT(RunsOf(tensor, 0, numel + 1),
                StatusIs(kInvalid,
                         HasSubstr(absl::StrCat("no elements 0 to ", numel + 1,
                                                ", but ", numel))));
  }
}

// A file of such tensors, with what DCP says of them if it is not empty.
SafetensorsFile File(std::string name, const std::vector<TensorInfo>& tensors,
                     const std::string& sharding = "") {
  SafetensorsFile file{std::move(name), {{}, *PlaceTensors(tensors), 4096}};
  if (!sharding.empty()) {
    file.header.metadata[std::string(kShardingInfoKey)] = sharding;
  }
  std::sort(file.header.tensors.begin(), file.header.tensors.end(),
            [](const PlacedTensor& a, const PlacedTensor& b) {
              return a.begin < b.begin;
            });
  return file;
}

TEST(SafetensorsCatalogTest, TensorsAreWholeWithoutShardingInfo) {
  ASSERT_OK_AND_ASSIGN(
      Catalog catalog,
      CatalogOfSafetensors(
          {File("1", {{"a", Dtype::kU8, {3}}, {"b", Dtype::kF32, {2}}}),
           File("2", {{"c", Dtype::kF32, {}}})}));
  EXPECT_EQ(catalog.files()[0].bytes, 4096 + 11);
  EXPECT_THAT(*RunsOf(*catalog.Find("a"), 1, 3),
              ElementsAre(FileRun{{0, 4096 + 9, 2}, 0}));
  EXPECT_THAT(*RunsOf(*catalog.Find("c"), 0, 1),
              ElementsAre(FileRun{{1, 4096, 4}, 0}));
  EXPECT_THAT(CatalogOfSafetensors({File("1", {{"a", Dtype::kU8, {3}}}),
                                    File("2", {{"a", Dtype::kU8, {3}}})}),
              StatusIs(kInvalid, HasSubstr("is in 1 as well")));
}

TEST(SafetensorsCatalogTest, PiecesOfRanksAreJoined) {
  const std::vector<SafetensorsFile> files = {
      File("2", {{"w", Dtype::kU8, {1, 3}}},
           R"({"w": {"saved_offsets": [2, 0]}})"),
      File("1", {{"w", Dtype::kU8, {2, 3}}, {"s", Dtype::kU8, {}}},
           R"({"w": {"saved_offsets": [0, 0]}, "s": {"saved_offsets": []}})")};
  ASSERT_OK_AND_ASSIGN(Catalog catalog, CatalogOfSafetensors(files));
  EXPECT_THAT(catalog.Find("w")->info.shape, ElementsAre(3, 3));
  EXPECT_THAT(*RunsOf(*catalog.Find("w"), 4, 8),
              ElementsAre(FileRun{{1, 4100, 2}, 0}, FileRun{{0, 4096, 2}, 2}));
  // The first is missing.
  EXPECT_THAT(CatalogOfSafetensors({files[0]}),
              StatusIs(kInvalid, HasSubstr("element [0, 0] is in none")));
}

TEST(SafetensorsCatalogTest, NewerKeysHaveSeveralPiecesAndTheShape) {
  const std::vector<SafetensorsFile> files = {
      File("1", {{"w.1", Dtype::kU8, {1}}, {"w.0", Dtype::kU8, {2}}}, R"({
          "w.0": {"logical_fqn": "w", "saved_offsets": [0], "global_shape": [3]},
          "w.1": {"logical_fqn": "w", "saved_offsets": [2], "global_shape": [3]}
          })")};
  ASSERT_OK_AND_ASSIGN(Catalog catalog, CatalogOfSafetensors(files));
  EXPECT_EQ(catalog.tensors().size(), 1);
  EXPECT_THAT(*RunsOf(*catalog.Find("w"), 0, 3),
              ElementsAre(FileRun{{0, 4097, 2}, 0}, FileRun{{0, 4096, 1}, 2}));
  EXPECT_THAT(CatalogOfSafetensors({File(
                  "1", {{"w", Dtype::kU8, {2}}},
                  R"({"w": {"saved_offsets": [0], "global_shape": [3]}})")}),
              StatusIs(kInvalid, HasSubstr("element [2] is in none")));
}

struct Hostile {
  absl::string_view sharding;  // of U8 "w" [1, 3] beside U8 "x" [1]
  absl::string_view message;
};

constexpr Hostile kHostile[] = {
    {"{", "1: JSON, byte 1"},
    {"[]", "expected an object"},
    {R"({"w": 1})", "DCP_SHARDING_INFO of \"w\": it has no"},
    {R"({"w": {"saved_offsets": 1}})", "is 1, not a list of integers"},
    {R"({"w": {"saved_offsets": [-1, 0]}})", "is [-1, 0], not a list of"},
    {R"({"w": {"saved_offsets": [], "global_shape": [0.5]}})",
     "\"global_shape\" is [0.5], not a list"},
    {R"({"w": {"saved_offsets": [], "logical_fqn": 1}})",
     "\"logical_fqn\" is no string"},
    {R"({"w": {"saved_offsets": [0]}})",
     "1, tensor \"w\": is U8[1, 3], but at [0]"},
    {R"({"w": {"saved_offsets": [0, 9223372036854775807]}})",
     "beyond what 64 bits count"},
    {R"({"w": {"saved_offsets": [0, 0]}})",
     "1, tensor \"x\": is not in the file's DCP_SHARDING_INFO"},
    {R"({"w": {"saved_offsets": [0, 0]},
                    "x": {"saved_offsets": [0], "logical_fqn": "w"}})",
     "another dtype, shape or number of dimensions"},
    {R"({"w": {"saved_offsets": [0, 0], "global_shape": [1]},
                    "x": {"saved_offsets": [0]}})",
     "does not lie inside"}};

TEST(HostileShardingTest, IsRefusedWithItsReason) {
  for (const Hostile& one : kHostile) {
    EXPECT_THAT(CatalogOfSafetensors({File(
                    "1", {{"w", Dtype::kU8, {1, 3}}, {"x", Dtype::kU8, {1}}},
                    std::string(one.sharding))}),
                StatusIs(kInvalid, HasSubstr(std::string(one.message))))
        << one.sharding;
  }
}

FileIndex Index(absl::string_view json) { return *ParseFileIndex(json); }

TEST(HuggingFaceCatalogTest, AllDifferencesAreReportedAtOnce) {
  const FileIndex index = Index(
      R"({"weight_map": {"a": "1", "gone": "1", "moved": "2", "far": "3"}})");
  const absl::StatusOr<Catalog> catalog =
      CatalogOfHuggingFace(index, {File("1", {{"a", Dtype::kU8, {3}},
                                              {"moved", Dtype::kU8, {1}},
                                              {"new", Dtype::kU8, {1}}}),
                                   File("2", {}), File("4", {})});
  EXPECT_THAT(
      catalog,
      StatusIs(kInvalid,
               ::testing::AllOf(HasSubstr("tensor \"gone\" is missing in 1"),
                                HasSubstr("tensor \"moved\" is missing in 2"),
                                HasSubstr("file 3 is missing"),
                                HasSubstr("file 4 is not in the index"),
                                ::testing::Not(HasSubstr("\"far\"")))));
}

TEST(HuggingFaceCatalogTest, TheIndexDecidesWhichFileHasATensor) {
  ASSERT_OK_AND_ASSIGN(
      Catalog catalog,
      CatalogOfHuggingFace(
          Index(R"({"weight_map": {"a": "1", "b": "2"}})"),
          {File("1", {{"a", Dtype::kU8, {3}}, {"b", Dtype::kU8, {7}}}),
           File("2", {{"b", Dtype::kU8, {2}}, {"old", Dtype::kU8, {1}}})}));
  EXPECT_EQ(catalog.tensors().size(), 2);
  EXPECT_THAT(*RunsOf(*catalog.Find("b"), 0, 2),
              ElementsAre(FileRun{{1, 4096, 2}, 0}));
}

TEST(HuggingFaceCatalogTest, AListOfDifferencesEnds) {
  FileIndex index = Index(R"({"weight_map": {"a": "1"}})");
  for (int i = 0; i < 60; ++i) {
    index.weights.emplace_back(std::to_string(i), 0);
  }
  EXPECT_THAT(
      CatalogOfHuggingFace(index, {File("1", {{"a", Dtype::kU8, {1}}})}),
      StatusIs(kInvalid, HasSubstr("; and 10 more")));
}

}  // namespace
}  // namespace fsdp::checkpoint
