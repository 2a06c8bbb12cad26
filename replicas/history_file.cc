#include "replicas/history_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

absl::StatusOr<std::unique_ptr<HistoryFile>> HistoryFile::Open(
    const std::string& folder, int replica) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path = absl::StrCat(folder, "/replica-", replica, ".txt");
  std::unique_ptr<HistoryFile> file(new HistoryFile(path));
  if (error || !std::ofstream(path, std::ios::app)) {
    return absl::ErrnoToStatus(
        error ? error.value() : errno,
        absl::StrCat("opening the history of replicas, ", path));
  }
  return file;
}

absl::Status HistoryFile::Add(const Roster& roster) {
  if (!history_.Add(roster)) return absl::OkStatus();
  std::ofstream file(path_, std::ios::app);
  file << ToLine(history_.spans().back()) << "\n" << std::flush;
  if (file) return absl::OkStatus();
  return absl::ErrnoToStatus(
      errno, absl::StrCat("writing the history of replicas to ", path_));
}

}  // namespace fsdp::replicas
