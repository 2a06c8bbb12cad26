#include "checkpoint/save/save_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/tensor_bytes.h"
#include "checkpoint/format/tensor_info.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::checkpoint {
namespace {

// Adds what ranks have to agree on of each tensor.
void AddLines(const TensorGroup& group, SavePlan* plan) {
  for (const TensorRange& part : group.parts) {
    absl::StrAppend(&plan->text, group.stem, ": ", part.name, " ",
                    ToString(InfoOf(part)), "\n");
  }
}

absl::Status PlanGroup(const TensorGroup& group, int64_t max_file_bytes,
                       SavePlan* plan) {
  AddLines(group, plan);
  std::vector<TensorInfo> infos;
  infos.reserve(group.parts.size());
  for (const TensorRange& part : group.parts) infos.push_back(InfoOf(part));
  const absl::string_view folder = FolderPart(group.stem);
  FSDP_ASSIGN_OR_RETURN(FilePlan files,
                        PlanFiles(infos, LastPart(group.stem), max_file_bytes));
  const auto first_file = static_cast<int64_t>(plan->files.size());
  for (PlannedFile& file : files.files) {
    file.name.insert(0, folder.data(), folder.size());
    plan->files.push_back(std::move(file));
  }
  for (size_t i = 0; i < group.parts.size(); ++i) {
    const TensorRange& part = group.parts[i];
    const int64_t item = ItemBytes(infos[i].dtype);
    const int64_t bytes = part.values.numel() * item;
    if (bytes == 0) continue;
    plan->ranges.push_back(
        {{first_file + files.tensors[i].file,
          files.tensors[i].offset + part.begin * item, bytes},
         part});
  }
  return absl::OkStatus();
}

absl::Status PlanGroupPerRank(const TensorGroup& group, int rank,
                              SavePlan* plan) {
  AddLines(group, plan);
  std::vector<RankRange> parts;
  for (const TensorRange& part : group.parts) {
    const int64_t count = part.values.numel();
    const int64_t begin = count == 0 ? 0 : part.begin;
    parts.push_back({InfoOf(part), begin, begin + count});
  }
  const absl::string_view folder = FolderPart(group.stem);
  FSDP_ASSIGN_OR_RETURN(std::vector<ShardFile> files,
                        PlanShardFiles(rank, parts, LastPart(group.stem)));
  for (ShardFile& file : files) {
    const auto index = static_cast<int64_t>(plan->own.size());
    for (const ShardPiece& piece : file.pieces) {
      const int64_t count = piece.end - piece.begin;
      if (count == 0) continue;
      TensorRange part = group.parts[piece.range];
      part.values = part.values.narrow(0, piece.begin - part.begin, count);
      part.begin = piece.begin;
      const int64_t item = ItemBytes(parts[piece.range].tensor.dtype);
      plan->ranges.push_back(
          {{index, piece.offset, count * item}, std::move(part)});
    }
    file.name.insert(0, folder.data(), folder.size());
    plan->own.push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace

void SavePlan::Add(const std::map<std::string, std::string>& texts) {
  for (const auto& [name, text] : texts) own.push_back(WholeFile(name, text));
}

int64_t SavePlan::BytesOfRanges() const {
  int64_t bytes = 0;
  for (const SaveRange& range : ranges) bytes += range.bytes;
  return bytes;
}

int64_t SavePlan::BytesToWrite(int rank) const {
  int64_t bytes = BytesOfRanges();
  const auto add_headers = [&bytes](const std::vector<PlannedFile>& of) {
    for (const PlannedFile& file : of) {
      bytes += static_cast<int64_t>(file.header.size());
    }
  };
  if (rank == 0) add_headers(files);
  add_headers(own);
  return bytes;
}

absl::Status CheckTextName(absl::string_view option, absl::string_view name) {
  if (IsPlainFileName(name) && name[0] != '.' &&
      !absl::StrContains(name, ".safetensors")) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      option, ": \"", name,
      "\" is no name for a file beside the model's: take one such as "
      "config.json"));
}

absl::StatusOr<SavePlan> PlanSave(absl::Span<const TensorGroup> groups,
                                  int64_t max_file_bytes) {
  SavePlan plan;
  for (const TensorGroup& group : groups) {
    FSDP_RETURN_IF_ERROR(PlanGroup(group, max_file_bytes, &plan));
  }
  for (const PlannedFile& file : plan.files) {
    absl::StrAppend(&plan.text, file.name, " of ", file.bytes, " bytes\n");
  }
  return plan;
}

absl::StatusOr<SavePlan> PlanSavePerRank(absl::Span<const TensorGroup> groups,
                                         int rank) {
  SavePlan plan;
  plan.text = "files of each rank\n";
  for (const TensorGroup& group : groups) {
    FSDP_RETURN_IF_ERROR(PlanGroupPerRank(group, rank, &plan));
  }
  std::sort(plan.ranges.begin(), plan.ranges.end(),
            [](const SaveRange& a, const SaveRange& b) {
              return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
            });
  return plan;
}

absl::Status WriteHeaders(const SavePlan& plan, int rank, RangeWriter& writer) {
  int64_t index = 0;
  for (const PlannedFile& file : plan.files) {
    if (rank == 0) {
      FSDP_RETURN_IF_ERROR(writer.SetSize(index, file.bytes));
      FSDP_RETURN_IF_ERROR(writer.WriteBytes(index, 0, file.header));
    }
    ++index;
  }
  for (const PlannedFile& file : plan.own) {
    FSDP_RETURN_IF_ERROR(writer.WriteBytes(index++, 0, file.header));
  }
  return absl::OkStatus();
}

absl::Status ForEachRange(
    const SavePlan& plan,
    absl::FunctionRef<absl::Status(const FilePlace& place, ReadBytes read)>
        use) {
  Resident held;
  for (const SaveRange& place : plan.ranges) {
    const TensorRange& range = place.range;
    // Released once the next is held: parameters of a unit share their memory.
    FSDP_ASSIGN_OR_RETURN(Resident next,
                          Resident::Of(range.values, Use::kRead, Where::kHost));
    held = std::move(next);
    const at::Tensor values = OnHost(range.values);
    FSDP_RETURN_IF_ERROR(use(place, [&](int64_t position,
                                        absl::Span<char> out) {
      return Annotate(ReadElements(values, range.file_dtype(), position, out),
                      range.name);
    }));
  }
  return absl::OkStatus();
}

absl::Status WriteLive(const SavePlan& plan, RangeWriter& writer) {
  return ForEachRange(plan, [&](const FilePlace& place, ReadBytes read) {
    return writer.Write(place.file, place.offset, place.bytes, read);
  });
}

}  // namespace fsdp::checkpoint
