#include "planner/tool/unit_file.h"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace fsdp::simulator {
namespace {

const char* const kColumns[] = {"name",       "parent",        "elements",
                                "trainable",  "forward_flops", "backward_flops",
                                "forward_ms", "backward_ms"};

// Bytes of so many elements fit 64 bits.
constexpr int64_t kMostElements = int64_t{1} << 44;

// Reads a file line by line; errors name the line.
class UnitReader {
 public:
  explicit UnitReader(absl::string_view source) : source_(source) {}

  absl::Status Add(absl::string_view line) {
    ++number_;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') return absl::OkStatus();
    std::vector<std::string> cells;
    for (const absl::string_view cell : absl::StrSplit(line, ',')) {
      cells.emplace_back(absl::StripAsciiWhitespace(cell));
    }
    if (columns_.empty()) return ReadColumns(std::move(cells));
    if (cells.size() != columns_.size()) {
      return Error(absl::StrCat("has ", cells.size(), " values for ",
                                columns_.size(), " columns"));
    }
    return ReadUnit(cells);
  }

  absl::StatusOr<ModelShape> Finish() && {
    if (!model_.units.empty()) return std::move(model_);
    return absl::InvalidArgumentError(
        absl::StrCat(source_,
                     " lists no units: a line with the names of the "
                     "columns, then one per unit"));
  }

 private:
  absl::Status Error(const std::string& what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(source_, ":", number_, ": ", what));
  }

  absl::Status ReadColumns(std::vector<std::string> names) {
    for (size_t i = 0; i < names.size(); ++i) {
      bool known = false;
      for (const char* column : kColumns) known |= names[i] == column;
      if (!known) {
        return Error(absl::StrCat("\"", names[i], "\" is no column; there are ",
                                  absl::StrJoin(kColumns, ", ")));
      }
      if (!columns_.emplace(names[i], i).second) {
        return Error(absl::StrCat("names the column ", names[i], " twice"));
      }
    }
    for (const char* needed : {"name", "elements"}) {
      if (columns_.count(needed) > 0) continue;
      return Error(absl::StrCat("has no column \"", needed,
                                "\": the first line names the columns"));
    }
    return absl::OkStatus();
  }

  // Returns `missing` where the column is missing or its cell is empty.
  absl::StatusOr<double> Number(const std::vector<std::string>& cells,
                                const char* column, double missing) const {
    const auto found = columns_.find(column);
    if (found == columns_.end() || cells[found->second].empty()) {
      return missing;
    }
    double value;
    if (!absl::SimpleAtod(cells[found->second], &value) || !(value >= 0) ||
        std::isinf(value)) {
      return Error(absl::StrCat(column, " is \"", cells[found->second],
                                "\": a number that is not negative"));
    }
    return value;
  }

  absl::StatusOr<int> Parent(const std::vector<std::string>& cells) const {
    const auto found = columns_.find("parent");
    const std::string name =
        found == columns_.end() ? "" : cells[found->second];
    if (model_.units.empty()) {
      if (name.empty()) return -1;
      return Error("the first unit is the root, which has no parent");
    }
    if (name.empty()) return 0;
    const auto parent = index_.find(name);
    if (parent != index_.end()) return parent->second;
    return Error(absl::StrCat("the parent \"", name, "\" is no unit above"));
  }

  absl::Status ReadUnit(const std::vector<std::string>& cells) {
    UnitShape unit;
    unit.name = cells[columns_.at("name")];
    if (unit.name.empty()) return Error("the unit has no name");
    FSDP_ASSIGN_OR_RETURN(unit.parent, Parent(cells));
    const std::string& text = cells[columns_.at("elements")];
    int64_t elements;
    if (!absl::SimpleAtoi(text, &elements) || elements < 0 ||
        elements > kMostElements) {
      return Error(absl::StrCat("elements is \"", text,
                                "\": a whole number from 0 to ",
                                kMostElements));
    }
    if (elements > 0) unit.parameters = {Parameter("weight", {elements})};
    FSDP_ASSIGN_OR_RETURN(const double trainable,
                          Number(cells, "trainable", 1));
    unit.trainable = trainable != 0;
    FSDP_ASSIGN_OR_RETURN(unit.forward.flops,
                          Number(cells, "forward_flops", 0));
    FSDP_ASSIGN_OR_RETURN(unit.backward.flops,
                          Number(cells, "backward_flops", 0));
    FSDP_ASSIGN_OR_RETURN(unit.forward.seconds, Number(cells, "forward_ms", 0));
    FSDP_ASSIGN_OR_RETURN(unit.backward.seconds,
                          Number(cells, "backward_ms", 0));
    unit.forward.seconds /= 1e3;
    unit.backward.seconds /= 1e3;
    const int index = static_cast<int>(model_.units.size());
    if (!index_.emplace(unit.name, index).second) {
      return Error(absl::StrCat("there is a unit \"", unit.name, "\" above"));
    }
    model_.units.push_back(std::move(unit));
    return absl::OkStatus();
  }

  const std::string source_;
  int number_ = 0;
  std::map<std::string, size_t> columns_;
  std::map<std::string, int> index_;  // by name
  ModelShape model_;
};

}  // namespace

absl::StatusOr<ModelShape> ParseUnits(absl::string_view text,
                                      absl::string_view source) {
  UnitReader reader(source);
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    FSDP_RETURN_IF_ERROR(reader.Add(line));
  }
  return std::move(reader).Finish();
}

namespace {

// The bytes of a GPT up to these sizes fit 64 bits.
constexpr int64_t kMostLayers = int64_t{1} << 16;
constexpr int64_t kLargestDim = int64_t{1} << 20;
constexpr int64_t kLargestCount = int64_t{1} << 28;

absl::Status CheckSize(const char* what, int64_t value, int64_t least,
                       int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a GPT with ", what, " ",
                                                 value, ": it has to be from ",
                                                 least, " to ", most));
}

void AddPair(const std::string& name, std::vector<int64_t> weight,
             UnitShape& unit) {
  const int64_t out = weight.front();
  unit.parameters.push_back(Parameter(name + ".weight", std::move(weight)));
  unit.parameters.push_back(Parameter(name + ".bias", {out}));
}

// The parameters are in the order of testing/gpt/model.cc.
UnitShape MakeBlock(const GptShape& gpt, int64_t index) {
  UnitShape block;
  block.name = absl::StrCat("blocks.", index);
  block.parent = 0;
  AddPair("ln1", {gpt.dim}, block);
  AddPair("qkv", {3 * gpt.dim, gpt.dim}, block);
  AddPair("proj", {gpt.dim, gpt.dim}, block);
  AddPair("ln2", {gpt.dim}, block);
  AddPair("fc", {4 * gpt.dim, gpt.dim}, block);
  AddPair("out", {gpt.dim, 4 * gpt.dim}, block);
  const double dim = static_cast<double>(gpt.dim);
  const double seq = static_cast<double>(gpt.seq);
  const double tokens = static_cast<double>(gpt.batch) * seq;
  const double linear = 2 * tokens * 12 * dim * dim;
  const double attention = 4 * tokens * seq * dim;
  block.forward.flops = linear + attention;
  block.backward.flops = (gpt.recompute ? 3 : 2) * block.forward.flops;
  return block;
}

}  // namespace

absl::StatusOr<ModelShape> MakeGpt(const GptShape& gpt) {
  FSDP_RETURN_IF_ERROR(CheckSize("layers", gpt.layers, 0, kMostLayers));
  FSDP_RETURN_IF_ERROR(CheckSize("dim", gpt.dim, 1, kLargestDim));
  FSDP_RETURN_IF_ERROR(CheckSize("vocab", gpt.vocab, 1, kLargestCount));
  FSDP_RETURN_IF_ERROR(CheckSize("seq", gpt.seq, 1, kLargestCount));
  FSDP_RETURN_IF_ERROR(CheckSize("batch", gpt.batch, 1, kLargestCount));
  ModelShape model;
  UnitShape& root = model.units.emplace_back();
  root.name = "root";
  root.parameters.push_back(Parameter("wte.weight", {gpt.vocab, gpt.dim}));
  root.parameters.push_back(Parameter("wpe.weight", {gpt.seq, gpt.dim}));
  AddPair("ln", {gpt.dim}, root);
  root.parameters.push_back(Parameter("head.weight", {gpt.vocab, gpt.dim}));
  root.forward.flops =
      2.0 * static_cast<double>(gpt.batch) * static_cast<double>(gpt.seq) *
      static_cast<double>(gpt.vocab) * static_cast<double>(gpt.dim);
  root.backward.flops = 2 * root.forward.flops;
  for (int64_t i = 0; i < gpt.layers; ++i) {
    model.units.push_back(MakeBlock(gpt, i));
  }
  return model;
}

}  // namespace fsdp::simulator
