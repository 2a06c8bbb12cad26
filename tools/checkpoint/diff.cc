#include "tools/checkpoint/diff.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/tensor/tensor_info.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/tensor_figures.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

// Elements of one tensor that are in memory at a time, of both.
constexpr int64_t kWindow = int64_t{1} << 20;

// One side of the comparison.
struct Side {
  const Source* source = nullptr;
  std::unique_ptr<RangeReader> reader;
  std::string bytes;  // buffers
  std::vector<double> numbers;

  absl::Status Fill(const StoredTensor& tensor, int64_t begin, int64_t end) {
    bytes.clear();
    return StreamElements(*reader, tensor, begin, end,
                          [this](absl::Span<const char> part) {
                            bytes.append(part.data(), part.size());
                            return absl::OkStatus();
                          });
  }

  const std::vector<double>& Numbers(Dtype dtype) {
    numbers.clear();
    AppendNumbers(dtype, bytes, numbers);
    return numbers;
  }
};

struct TensorDiff {
  const TensorInfo* info = nullptr;
  int64_t different = 0;  // elements, by bits or by values; of F4: bytes
  bool has_numbers = false;
  Differences values;
};

int64_t DifferentItems(absl::string_view a, absl::string_view b, size_t item) {
  int64_t count = 0;
  for (size_t at = 0; at + item <= a.size() && at + item <= b.size();
       at += item) {
    if (std::memcmp(a.data() + at, b.data() + at, item) != 0) ++count;
  }
  return count;
}

class Comparison {
 public:
  Comparison(const Source& a, const Source& b, const DiffOptions& options)
      : options_(options) {
    a_.source = &a;
    b_.source = &b;
  }

  absl::StatusOr<DiffResult> Run() {
    FSDP_ASSIGN_OR_RETURN(a_.reader, ReaderOf(*a_.source));
    FSDP_ASSIGN_OR_RETURN(b_.reader, ReaderOf(*b_.source));
    FSDP_RETURN_IF_ERROR(CompareNames());
    for (const auto& [a, b] : both_) {
      FSDP_RETURN_IF_ERROR(CompareTensor(*a, *b));
    }
    DiffResult result;
    result.same = only_a_.empty() && only_b_.empty() && other_.empty() &&
                  different_.empty();
    result.text = Text();
    return result;
  }

 private:
  using Row = std::vector<std::string>;

  absl::Status CompareNames() {
    const Catalog& b_catalog = b_.source->catalog;
    for (const StoredTensor& a : a_.source->catalog.tensors()) {
      const StoredTensor* const b = b_catalog.Find(a.info.name);
      const std::string name = Printable(a.info.name);
      if (b == nullptr) {
        only_a_.push_back({name, ToString(a.info)});
        continue;
      }
      if (a.info.shape != b->info.shape || a.info.dtype != b->info.dtype) {
        other_.push_back({name, ToString(a.info), ToString(b->info)});
      }
      const bool comparable =
          a.info.dtype == b->info.dtype ||
          (IsNumber(a.info.dtype) && IsNumber(b->info.dtype));
      if (a.info.shape != b->info.shape || !comparable) continue;
      both_.emplace_back(&a, b);
      FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(a.info));
      total_ += bytes;
    }
    for (const StoredTensor& b : b_catalog.tensors()) {
      if (a_.source->catalog.Find(b.info.name) == nullptr) {
        only_b_.push_back({Printable(b.info.name), ToString(b.info)});
      }
    }
    return absl::OkStatus();
  }

  absl::Status CompareTensor(const StoredTensor& a, const StoredTensor& b) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(a.info));
    TensorDiff diff;
    diff.info = &a.info;
    diff.has_numbers = IsNumber(a.info.dtype);
    // What does not fill bytes cannot be cut.
    const int64_t window = ItemBytes(a.info.dtype) == 0 ? numel : kWindow;
    for (int64_t begin = 0; begin < numel; begin += window) {
      const int64_t end = std::min(numel, begin + window);
      FSDP_RETURN_IF_ERROR(a_.Fill(a, begin, end));
      FSDP_RETURN_IF_ERROR(b_.Fill(b, begin, end));
      CompareWindow(begin, a.info.dtype, b.info.dtype, diff);
      done_ += static_cast<int64_t>(a_.bytes.size());
      if (options_.progress) options_.progress(done_, total_);
    }
    if (diff.different > 0) different_.push_back(diff);
    return absl::OkStatus();
  }

  void CompareWindow(int64_t begin, Dtype a, Dtype b, TensorDiff& diff) {
    if (a == b && a_.bytes == b_.bytes) return;
    const int64_t before = diff.values.elements;
    if (diff.has_numbers) {
      diff.values.Add(begin, a_.Numbers(a), b_.Numbers(b));
    }
    diff.different += a == b ? DifferentItems(a_.bytes, b_.bytes,
                                              std::max<size_t>(1, ItemBytes(a)))
                             : diff.values.elements - before;
  }

  static std::string Section(absl::string_view title,
                             const std::vector<Row>& rows,
                             absl::string_view alignment) {
    if (rows.empty()) return "";
    return absl::StrCat(title, " (", rows.size(), ")\n",
                        Columns(rows, alignment));
  }

  // The tensors for which `figure` is the largest; what is not finite first.
  template <typename Figure>
  std::string Largest(absl::string_view title, Figure figure) {
    std::stable_sort(
        different_.begin(), different_.end(),
        [&](const TensorDiff& x, const TensorDiff& y) {
          return std::make_pair(x.values.not_finite > 0, figure(x.values)) >
                 std::make_pair(y.values.not_finite > 0, figure(y.values));
        });
    std::vector<Row> rows;
    for (const TensorDiff& diff : different_) {
      if (static_cast<int64_t>(rows.size()) == options_.top) break;
      Row row = {Printable(diff.info->name),
                 diff.has_numbers ? NumberText(figure(diff.values)) : "?",
                 Count(diff.different, "element")};
      if (diff.values.at >= 0) {
        row.push_back(absl::StrCat("largest at ", diff.values.at));
      }
      if (diff.values.not_finite > 0) {
        row.resize(4);
        row.push_back(
            absl::StrCat(Thousands(diff.values.not_finite), " not finite"));
      }
      rows.push_back(std::move(row));
    }
    return absl::StrCat(title, "\n", Columns(rows, "lrrll"));
  }

  std::string Text() {
    std::string text = absl::StrCat(
        "A: ", Printable(a_.source->path), ", ", NameOf(a_.source->format),
        "\nB: ", Printable(b_.source->path), ", ", NameOf(b_.source->format),
        "\n", Section("only in A", only_a_, "ll"),
        Section("only in B", only_b_, "ll"),
        Section("of another shape or dtype", other_, "lll"));
    absl::StrAppend(&text, "values of ",
                    Count(static_cast<int64_t>(both_.size()), "tensor"),
                    " compared: ", different_.size(), " differ\n");
    if (different_.empty() || options_.top == 0) return text;
    absl::StrAppend(&text,
                    Largest("largest |a - b|",
                            [](const Differences& d) { return d.absolute; }),
                    Largest("largest |a - b| / max(|a|, |b|)",
                            [](const Differences& d) { return d.relative; }));
    return text;
  }

  const DiffOptions& options_;
  Side a_;
  Side b_;
  std::vector<Row> only_a_;
  std::vector<Row> only_b_;
  std::vector<Row> other_;
  std::vector<std::pair<const StoredTensor*, const StoredTensor*>> both_;
  std::vector<TensorDiff> different_;
  int64_t done_ = 0;
  int64_t total_ = 0;
};

}  // namespace

absl::StatusOr<DiffResult> Diff(const Source& a, const Source& b,
                                const DiffOptions& options) {
  return Comparison(a, b, options).Run();
}

}  // namespace fsdp::checkpoint::tool
