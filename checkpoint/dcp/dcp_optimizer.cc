#include "checkpoint/dcp/dcp_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/chunk_reader.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/place_reader.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/value.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kStates[] = "state";
constexpr char kGroups[] = "param_groups";
constexpr char kParameters[] = "params";  // of a group
constexpr char kStep[] = "step";

// What a name of the state dict is the name of.
struct Entry {
  bool is_state = false;  // otherwise an option of a group
  std::string owner;      // a state's parameter; flattened: a group's
  int64_t group = -1;     // not flattened
  std::string key;        // "exp_avg", "lr"; empty: all groups, in a list
};

// "NAME.KEY": no key has a dot in it.
bool Split(absl::string_view text, Entry& entry) {
  const size_t dot = text.rfind('.');
  if (dot == absl::string_view::npos) return false;
  entry.owner = std::string(text.substr(0, dot));
  entry.key = std::string(text.substr(dot + 1));
  return true;
}

// Nothing for what is of no optimizer.
std::optional<Entry> EntryOf(const DcpPath& path) {
  Entry entry;
  // As PyTorch saved it before 2.4.
  if (path.size() == 2 && path[1] == DcpPath::value_type(kGroups)) return entry;
  const int64_t* const index =
      path.size() >= 4 && path[1] == DcpPath::value_type(kGroups)
          ? std::get_if<int64_t>(&path[2])
          : nullptr;
  if (index != nullptr && *index >= 0) {
    entry.group = *index;
    entry.key = DcpName(DcpPath(path.begin() + 3, path.end()));
    return entry;
  }
  const std::string name = DcpName(DcpPath(path.begin() + 1, path.end()));
  absl::string_view text = name;
  entry.is_state = absl::ConsumePrefix(&text, absl::StrCat(kStates, "."));
  if (!entry.is_state &&
      !absl::ConsumePrefix(&text, absl::StrCat(kGroups, "."))) {
    return std::nullopt;
  }
  if (!Split(text, entry)) return std::nullopt;
  return entry;
}

Json JsonOf(const Value& value);

Json::Array ArrayOf(const std::vector<Value>& items) {
  Json::Array array;
  array.reserve(items.size());
  for (const Value& item : items) array.push_back(JsonOf(item));
  return array;
}

// Recurses no deeper than what ReadDcpValue() reads.
Json JsonOf(const Value& value) {
  if (std::holds_alternative<Value::None>(value.is)) return Json();
  if (const auto* const flag = std::get_if<bool>(&value.is)) return *flag;
  if (const auto* const whole = std::get_if<int64_t>(&value.is)) return *whole;
  if (const auto* const real = std::get_if<double>(&value.is)) return *real;
  if (const auto* const text = std::get_if<std::string>(&value.is)) {
    return *text;
  }
  if (const auto* const tuple = std::get_if<Value::Tuple>(&value.is)) {
    return ArrayOf(tuple->items);
  }
  if (const auto* const list = std::get_if<Value::List>(&value.is)) {
    return ArrayOf(list->items);
  }
  return value.dict() != nullptr ? "a dict" : "a tensor";
}

// The only element of a tensor.
absl::StatusOr<Json> NumberOf(Dtype dtype, const char* bytes) {
  const auto as = [bytes](auto number) {
    std::memcpy(&number, bytes, sizeof(number));
    return number;
  };
  switch (dtype) {
    case Dtype::kF32:
      return Json(static_cast<double>(as(float{})));
    case Dtype::kF64:
      return Json(as(double{}));
    case Dtype::kI32:
      return Json(as(int32_t{}));
    case Dtype::kI64:
      return Json(as(int64_t{}));
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("is a number of ", NameOf(dtype),
                       "; F32, F64, I32 and I64 are read"));
  }
}

absl::StatusOr<int64_t> CountOf(const Json& json) {
  constexpr double kMost = int64_t{1} << 53;  // the last that doubles can count
  const bool is_number =
      json.As<int64_t>() != nullptr || json.As<double>() != nullptr;
  const double number = json.NumberOr(-1);
  if (is_number && number >= 0 && number <= kMost &&
      number == std::floor(number)) {
    return static_cast<int64_t>(number);
  }
  return absl::InvalidArgumentError("is no count");
}

absl::StatusOr<std::vector<std::string>> NamesOf(const Json& json) {
  const auto* const list = json.As<Json::Array>();
  std::vector<std::string> names;
  for (const Json& item : list == nullptr ? Json::Array() : *list) {
    const auto* const name = item.As<std::string>();
    if (name == nullptr) break;
    names.push_back(*name);
  }
  if (list != nullptr && names.size() == list->size()) return names;
  return absl::InvalidArgumentError(
      "is no list of names: save what get_state_dict() of "
      "torch.distributed.checkpoint.state_dict returns");
}

// A number or an option, and where it is.
struct Scalar {
  std::string name;  // in the state dict
  Entry entry;
  DcpPlace place;
  const DcpTensor* tensor;  // null: a value
};

// What a checkpoint has of an optimizer.
struct Entries {
  std::map<std::string, std::vector<DcpTensor>> slots;
  std::vector<Scalar> scalars;
};

absl::Status Bad(const std::string& folder, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(folder, ": ", why));
}

// Finds entries by their names; reads no file.
class Finder {
 public:
  Finder(const std::string& folder, const DcpMetadata& metadata)
      : folder_(folder), metadata_(metadata) {}

  absl::StatusOr<Entries> Find() && {
    absl::flat_hash_map<absl::string_view, const DcpPath*> paths;
    for (const auto& [name, path] : metadata_.paths) paths[name] = &path;
    const auto find = [&](const std::string& name) -> std::optional<Entry> {
      const auto path = paths.find(name);
      if (path == paths.end() || !IsInItem(*path->second)) return std::nullopt;
      std::optional<Entry> entry = EntryOf(*path->second);
      if (entry.has_value()) {
        items_.insert(std::get<std::string>(path->second->front()));
      }
      return entry;
    };
    for (const DcpTensor& tensor : metadata_.tensors) {
      if (IsMegatronOptimizer(metadata_, tensor.info.name)) {
        const std::string why = absl::StrCat(
            "has the optimizer as Megatron keeps it, such as \"",
            absl::CHexEscape(tensor.info.name),
            "\", which is not read: load the model alone, by LoadModel() or "
            "with TrainingRun::optimizer null");
        return Bad(folder_, why);
      }
      std::optional<Entry> entry = find(tensor.info.name);
      if (entry.has_value()) {
        FSDP_RETURN_IF_ERROR(AddTensor(tensor, *std::move(entry)));
      }
    }
    for (const auto& [name, place] : metadata_.values) {
      std::optional<Entry> entry = find(name);
      if (!entry.has_value()) continue;
      found_.scalars.push_back({name, *std::move(entry), place, nullptr});
    }
    if (items_.size() < 2) return std::move(found_);
    return Bad(folder_,
               "has an optimizer in \"optim\" and another in \"optimizer\"");
  }

 private:
  static bool IsInItem(const DcpPath& path) {
    const std::string* const item =
        path.size() < 2 ? nullptr : std::get_if<std::string>(&path.front());
    return item != nullptr && std::find(std::begin(kDcpOptimizerItems),
                                        std::end(kDcpOptimizerItems),
                                        *item) != std::end(kDcpOptimizerItems);
  }

  absl::Status AddTensor(const DcpTensor& tensor, Entry entry) {
    if (entry.is_state && entry.key != kStep) {
      DcpTensor state = tensor;
      state.info.name = std::move(entry.owner);
      found_.slots[entry.key].push_back(std::move(state));
      return absl::OkStatus();
    }
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
    if (numel != 1) {
      return Bad(folder_, absl::StrCat("\"", absl::CHexEscape(tensor.info.name),
                                       "\": is no number but a tensor, ",
                                       ToString(tensor.info)));
    }
    found_.scalars.push_back({tensor.info.name, std::move(entry),
                              tensor.chunks.front().place, &tensor});
    return absl::OkStatus();
  }

  const std::string& folder_;
  const DcpMetadata& metadata_;
  std::set<std::string> items_;  // that have any entry
  Entries found_;
};

class Reader {
 public:
  Reader(FileSystem& files, const std::string& folder,
         const DcpMetadata& metadata)
      : files_(files),
        folder_(folder),
        metadata_(metadata),
        places_(files, folder, metadata.files) {}

  absl::StatusOr<DcpOptimizer> Read() && {
    FSDP_ASSIGN_OR_RETURN(Entries entries, Finder(folder_, metadata_).Find());
    FSDP_RETURN_IF_ERROR(ReadScalars(std::move(entries.scalars)));
    for (auto& [name, tensors] : entries.slots) {
      FSDP_ASSIGN_OR_RETURN(
          result_.slots[name],
          FindDcpTensors(files_, folder_, metadata_.files, tensors));
    }
    if (!groups_.empty() && !flat_groups_.empty()) {
      return Bad(folder_,
                 "has groups of an optimizer both in a list and flattened");
    }
    result_.is_flattened = !flat_groups_.empty();
    for (auto& [index, group] : groups_) {
      result_.groups.push_back(std::move(group));
    }
    for (auto& [name, group] : flat_groups_) {
      group.names = {name};
      result_.groups.push_back(std::move(group));
    }
    return std::move(result_);
  }

 private:
  absl::Status ReadScalars(std::vector<Scalar> scalars) {
    std::sort(scalars.begin(), scalars.end(),
              [](const Scalar& a, const Scalar& b) {
                return std::tie(a.place.file, a.place.offset) <
                       std::tie(b.place.file, b.place.offset);
              });
    int file = -1;
    int64_t end = 0;  // of the one before it, in the same file
    for (const Scalar& scalar : scalars) {
      const std::string what =
          absl::StrCat("\"", absl::CHexEscape(scalar.name), "\"");
      FSDP_RETURN_IF_ERROR(places_.Open(scalar.place, what));
      if (scalar.place.file != file) end = 0;
      file = scalar.place.file;
      absl::Status status;
      // What is kept is no more than the file has.
      if (scalar.place.offset < end) {
        status = absl::InvalidArgumentError("overlaps another value");
      } else {
        status = ReadScalar(scalar);
      }
      end = scalar.place.offset + scalar.place.length;
      if (status.ok()) continue;
      return places_.InFile(absl::Status(
          status.code(), absl::StrCat(what, ": ", status.message())));
    }
    return absl::OkStatus();
  }

  absl::Status ReadScalar(const Scalar& scalar) {
    if (scalar.entry.key.empty()) return ReadGroups(scalar);
    FSDP_ASSIGN_OR_RETURN(Json json, scalar.tensor == nullptr
                                         ? ReadValue(scalar.place)
                                         : ReadElement(*scalar.tensor));
    const Entry& entry = scalar.entry;
    if (entry.is_state) {
      if (json == Json()) return absl::OkStatus();  // None: there is none
      const absl::StatusOr<int64_t> count = CountOf(json);
      // Whoever knows the optimizer knows that it has no other numbers.
      if (entry.key == kStep) FSDP_RETURN_IF_ERROR(count.status());
      result_.numbers[entry.owner][entry.key] = count.ok() ? *count : 0;
      return absl::OkStatus();
    }
    if (entry.group < 0) {
      flat_groups_[entry.owner].options[entry.key] = std::move(json);
      return absl::OkStatus();
    }
    return SetOption(entry.key, std::move(json), groups_[entry.group]);
  }

  static absl::Status SetOption(const std::string& key, Json json,
                                DcpGroup& group) {
    if (key == kParameters) {
      FSDP_ASSIGN_OR_RETURN(group.names, NamesOf(json));
    } else {
      group.options[key] = std::move(json);
    }
    return absl::OkStatus();
  }

  // A list of dicts.
  absl::Status ReadGroups(const Scalar& scalar) {
    if (scalar.tensor != nullptr) {
      return absl::InvalidArgumentError("is a tensor, not a list of groups");
    }
    FSDP_ASSIGN_OR_RETURN(const Value value,
                          ReadDcpValue(scalar.place, places_.read()));
    const auto* const list = std::get_if<Value::List>(&value.is);
    for (const Value& item :
         list == nullptr ? std::vector<Value>{Value()} : list->items) {
      if (item.dict() == nullptr) {
        return absl::InvalidArgumentError("is no list of groups");
      }
      DcpGroup& group = groups_[static_cast<int64_t>(groups_.size())];
      for (const auto& [key, option] : item.dict()->items) {
        const auto* const name = std::get_if<std::string>(&key.is);
        if (name == nullptr) {
          return absl::InvalidArgumentError("has an option without a name");
        }
        FSDP_RETURN_IF_ERROR(SetOption(*name, JsonOf(option), group));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Json> ReadValue(const DcpPlace& place) const {
    FSDP_ASSIGN_OR_RETURN(const Value value,
                          ReadDcpValue(place, places_.read()));
    return JsonOf(value);
  }

  absl::StatusOr<Json> ReadElement(const DcpTensor& tensor) const {
    const ReadAt read = places_.read();
    FSDP_ASSIGN_OR_RETURN(const int64_t at,
                          FindChunkBytes(tensor, tensor.chunks.front(), read));
    char bytes[sizeof(int64_t)] = {};
    const int64_t size = ItemBytes(tensor.info.dtype);
    if (size < 1 || size > static_cast<int64_t>(sizeof(bytes))) {
      return NumberOf(tensor.info.dtype, bytes);
    }
    FSDP_RETURN_IF_ERROR(
        read(at, absl::MakeSpan(bytes, static_cast<size_t>(size))));
    return NumberOf(tensor.info.dtype, bytes);
  }

  FileSystem& files_;
  const std::string& folder_;
  const DcpMetadata& metadata_;
  PlaceReader places_;
  std::map<int64_t, DcpGroup> groups_;
  std::map<std::string, DcpGroup> flat_groups_;  // by parameter
  DcpOptimizer result_;
};

}  // namespace

absl::StatusOr<DcpOptimizer> ReadDcpOptimizer(FileSystem& files,
                                              const std::string& folder,
                                              const DcpMetadata& metadata) {
  return Reader(files, folder, metadata).Read();
}

}  // namespace fsdp::checkpoint
