#include "checkpoint/save/rank_report.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "checkpoint/files/checksums.h"

namespace fsdp::checkpoint {
namespace {

// Lists of plain values, each with its length in front.
class Writer {
 public:
  template <typename T>
  void Add(const T* values, size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto size = static_cast<uint64_t>(count);
    bytes_.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes_.append(reinterpret_cast<const char*>(values), count * sizeof(T));
  }
  std::string Take() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  // Empty, and not ok(), where there is no such list.
  template <typename T>
  std::vector<T> Take() {
    uint64_t size = 0;
    if (bytes_.size() < sizeof(size)) return Fail<T>();
    std::memcpy(&size, bytes_.data(), sizeof(size));
    bytes_.remove_prefix(sizeof(size));
    if (size > bytes_.size() / sizeof(T)) return Fail<T>();
    std::vector<T> values(size);
    std::memcpy(values.data(), bytes_.data(), size * sizeof(T));
    bytes_.remove_prefix(size * sizeof(T));
    return values;
  }
  std::string TakeText() {
    const std::vector<char> text = Take<char>();
    return std::string(text.begin(), text.end());
  }
  bool ok() const { return ok_ && bytes_.empty(); }

 private:
  template <typename T>
  std::vector<T> Fail() {
    ok_ = false;
    bytes_ = {};
    return {};
  }

  absl::string_view bytes_;
  bool ok_ = true;
};

std::string FirstDifference(absl::string_view first, absl::string_view other) {
  const std::vector<absl::string_view> ours = absl::StrSplit(first, '\n');
  const std::vector<absl::string_view> theirs = absl::StrSplit(other, '\n');
  for (size_t i = 0; i < ours.size() && i < theirs.size(); ++i) {
    if (ours[i] == theirs[i]) continue;
    return absl::StrCat("rank 0 has \"", ours[i], "\" and that rank \"",
                        theirs[i], "\"");
  }
  return absl::StrCat("rank 0 has ", ours.size(), " files and tensors and ",
                      "that rank ", theirs.size());
}

}  // namespace

std::string Encode(const RankReport& report) {
  Writer writer;
  const int32_t code = report.status.raw_code();
  writer.Add(&code, 1);
  writer.Add(report.status.message().data(), report.status.message().size());
  writer.Add(report.plan.data(), report.plan.size());
  writer.Add(report.own_bytes.data(), report.own_bytes.size());
  writer.Add(&report.whole_values, 1);
  writer.Add(report.pieces.data(), report.pieces.size());
  return std::move(writer).Take();
}

absl::StatusOr<RankReport> Decode(absl::string_view bytes) {
  Reader reader(bytes);
  const std::vector<int32_t> code = reader.Take<int32_t>();
  const std::string message = reader.TakeText();
  RankReport report;
  report.plan = reader.TakeText();
  report.own_bytes = reader.Take<int64_t>();
  const std::vector<uint32_t> whole_values = reader.Take<uint32_t>();
  report.pieces = reader.Take<Piece>();
  if (!reader.ok() || code.size() != 1 || whole_values.size() != 1) {
    return absl::InternalError(
        "a rank has sent what is no report of a checkpoint: do all run the "
        "same program?");
  }
  report.status = absl::Status(static_cast<absl::StatusCode>(code[0]), message);
  report.whole_values = whole_values[0];
  return report;
}

absl::Status CheckReports(absl::Span<const RankReport> reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const absl::Status& status = reports[rank].status;
    if (status.ok()) continue;
    if (reports.size() == 1) return status;
    return absl::Status(status.code(),
                        absl::StrCat("rank ", rank, ": ", status.message()));
  }
  for (size_t rank = 1; rank < reports.size(); ++rank) {
    if (reports[rank].plan == reports[0].plan) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks do not save the same tensors: ",
        FirstDifference(reports[0].plan, reports[rank].plan), " (rank ", rank,
        "): do all have the same model and optimizer?"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
