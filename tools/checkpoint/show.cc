#include "tools/checkpoint/show.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "tools/checkpoint/elements.h"
#include "tools/checkpoint/tensor_figures.h"
#include "tools/checkpoint/tensor_stream.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr size_t kFirstValues = 8;
constexpr size_t kNamesListed = 8;

struct Total {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

absl::StatusOr<std::map<Dtype, Total>> TotalsOf(const Catalog& catalog) {
  std::map<Dtype, Total> totals;
  for (const StoredTensor& tensor : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
    Total& total = totals[tensor.info.dtype];
    ++total.tensors;
    total.elements += numel;
    total.bytes += bytes;
  }
  return totals;
}

std::string FilesText(const Source& source) {
  std::vector<std::vector<std::string>> rows;
  int64_t all = 0;
  const auto add = [&](const std::string& name, int64_t bytes) {
    rows.push_back({Printable(name), SizeText(bytes)});
    all += bytes;
  };
  if (source.manifest.has_value()) {
    for (const auto& [name, sums] : source.manifest->files) {
      add(name, sums.bytes);
    }
  } else {
    for (const StoredFile& file : source.catalog.files()) {
      add(file.name, file.bytes);
    }
  }
  return absl::StrCat(Count(static_cast<int64_t>(rows.size()), "file"), ", ",
                      SizeText(all), "\n", Columns(rows, "lr"));
}

absl::StatusOr<std::string> TotalsText(const Catalog& catalog) {
  FSDP_ASSIGN_OR_RETURN(const auto totals, TotalsOf(catalog));
  std::vector<std::vector<std::string>> rows;
  Total all;
  const auto add = [&rows](absl::string_view name, const Total& total) {
    rows.push_back({std::string(name), Count(total.tensors, "tensor"),
                    Count(total.elements, "element"), SizeText(total.bytes)});
  };
  for (const auto& [dtype, total] : totals) {
    add(NameOf(dtype), total);
    all.tensors += total.tensors;
    all.elements += total.elements;
    all.bytes += total.bytes;
  }
  if (totals.size() != 1) add("all", all);
  return absl::StrCat("tensors\n", Columns(rows, "lrrr"));
}

std::string PlaceText(const Catalog& catalog, const StoredTensor& tensor) {
  std::set<int> files;
  for (const StoredBox& box : tensor.boxes) files.insert(box.file);
  if (files.empty()) return "";
  std::string text = Printable(catalog.files()[*files.begin()].name);
  if (files.size() > 1) {
    absl::StrAppend(&text, " and ", files.size() - 1, " more");
  }
  if (tensor.boxes.size() > 1) {
    absl::StrAppend(&text, ", in ", tensor.boxes.size(), " pieces");
  }
  return text;
}

absl::StatusOr<std::string> TensorsText(const Catalog& catalog) {
  std::vector<std::vector<std::string>> rows;
  for (const StoredTensor& tensor : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
    rows.push_back({Printable(tensor.info.name), ToString(tensor.info),
                    SizeText(bytes), PlaceText(catalog, tensor)});
  }
  return Columns(rows, "llrl");
}

absl::Status NoSuchTensor(const Source& source, const std::string& name) {
  std::vector<std::string> alike;
  for (const StoredTensor& tensor : source.catalog.tensors()) {
    if (alike.size() == kNamesListed) break;
    if (absl::StrContains(tensor.info.name, name)) {
      alike.push_back(Printable(tensor.info.name));
    }
  }
  return absl::NotFoundError(absl::StrCat(
      source.path, " has no tensor \"", Printable(name), "\"",
      alike.empty()
          ? "; --tensors lists those it has"
          : absl::StrCat("; did you mean ", absl::StrJoin(alike, ", "), "?")));
}

std::string FiguresText(const TensorFigures& figures) {
  std::vector<std::vector<std::string>> rows;
  if (figures.finite > 0) {
    rows = {{"min", NumberText(figures.min)},
            {"max", NumberText(figures.max)},
            {"mean", NumberText(figures.Mean())},
            {"norm", NumberText(figures.Norm())}};
  }
  rows.push_back({"zeros", Thousands(figures.zeros)});
  rows.push_back({"NaN", Thousands(figures.nans)});
  rows.push_back({"Inf", Thousands(figures.infinities)});
  return Columns(rows, "ll");
}

}  // namespace

absl::StatusOr<std::string> Show(const Source& source, bool tensors) {
  FSDP_ASSIGN_OR_RETURN(const std::string totals, TotalsText(source.catalog));
  std::string text =
      absl::StrCat(Printable(source.path), ": ", NameOf(source.format),
                   source.manifest.has_value()
                       ? absl::StrCat(" of step ", source.manifest->step)
                       : "",
                   "\n", FilesText(source), totals);
  if (tensors) {
    FSDP_ASSIGN_OR_RETURN(const std::string list, TensorsText(source.catalog));
    absl::StrAppend(&text, list);
  }
  return text;
}

absl::StatusOr<std::string> ShowTensor(const Source& source,
                                       const std::string& name,
                                       const OnBytes& progress) {
  const StoredTensor* const tensor = source.catalog.Find(name);
  if (tensor == nullptr) return NoSuchTensor(source, name);
  const Dtype dtype = tensor->info.dtype;
  FSDP_ASSIGN_OR_RETURN(const int64_t total, BytesOf(tensor->info));
  FSDP_ASSIGN_OR_RETURN(const auto reader, ReaderOf(source));
  TensorFigures figures;
  std::string first;
  std::vector<double> numbers;
  int64_t done = 0;
  const size_t item = std::max<size_t>(1, ItemBytes(dtype));
  FSDP_RETURN_IF_ERROR(
      StreamTensor(*reader, *tensor, [&](absl::Span<const char> bytes) {
        const size_t wanted = kFirstValues * item - first.size();
        first.append(bytes.data(), std::min(wanted, bytes.size()));
        if (IsNumber(dtype)) {
          numbers.clear();
          AppendNumbers(dtype, bytes, numbers);
          figures.Add(numbers);
        }
        done += static_cast<int64_t>(bytes.size());
        if (progress) progress(done, total);
        return absl::OkStatus();
      }));
  std::vector<std::string> values;
  for (size_t at = 0; at < first.size(); at += item) {
    values.push_back(ElementText(dtype, first.substr(at, item)));
  }
  return absl::StrCat(
      Printable(name), "  ", ToString(tensor->info), "  ", SizeText(total),
      "  ", PlaceText(source.catalog, *tensor), "\n",
      IsNumber(dtype) ? FiguresText(figures) : "",
      "first values: ", values.empty() ? "none" : absl::StrJoin(values, ", "),
      "\n");
}

}  // namespace fsdp::checkpoint::tool
