#include "replicas/history_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

constexpr char kNamePrefix[] = "replica-";
constexpr char kNameSuffix[] = ".txt";

}  // namespace

absl::StatusOr<std::unique_ptr<HistoryFile>> HistoryFile::Open(
    const std::string& folder, const ReplicaId& self) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path =
      absl::StrCat(folder, "/", kNamePrefix, self.replica, kNameSuffix);
  if (self.incarnation == 1 && std::filesystem::exists(path)) {
    return absl::AlreadyExistsError(absl::StrCat(
        path,
        " is the history of another run: name another folder, or remove "
        "this one"));
  }
  std::unique_ptr<HistoryFile> file(new HistoryFile(path));
  if (error || !std::ofstream(path, std::ios::app)) {
    return absl::ErrnoToStatus(
        error ? error.value() : errno,
        absl::StrCat("opening the history of replicas, ", path));
  }
  return file;
}

absl::StatusOr<History> ReadHistory(const std::string& folder) {
  std::error_code error;
  std::vector<History> parts;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string path = entry.path().string();
    const std::string name = entry.path().filename().string();
    if (!absl::StartsWith(name, kNamePrefix) ||
        !absl::EndsWith(name, kNameSuffix)) {
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path));
    absl::StatusOr<History> part = History::Parse(text);
    if (!part.ok()) return Annotate(part.status(), path);
    parts.push_back(*std::move(part));
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat("reading the folder ", folder));
  }
  absl::StatusOr<History> merged = History::Merge(parts);
  if (merged.ok() && merged->spans().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, " has no history of replicas"));
  }
  if (!merged.ok()) return Annotate(merged.status(), folder);
  return merged;
}

absl::Status HistoryFile::Add(const Roster& roster) {
  const std::optional<std::string> line = history_.Add(roster);
  if (!line.has_value()) return absl::OkStatus();
  std::error_code ignored;
  const uintmax_t size = std::filesystem::file_size(path_, ignored);
  std::ofstream file(path_, std::ios::app);
  file << *line << "\n" << std::flush;
  if (file) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(
      errno, absl::StrCat("writing the history of replicas to ", path_));
  file.close();
  std::filesystem::resize_file(path_, size, ignored);  // leaves no half line
  return status;
}

}  // namespace fsdp::replicas
