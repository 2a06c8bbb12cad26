#include "testing/simulation/rot.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/check.h"

namespace fsdp::simulation {
namespace {

using checkpoint::FileInfo;
using checkpoint::FileSystem;

constexpr char kRoot[] = "/run";

std::vector<std::pair<std::string, int64_t>> FilesBelow(
    FileSystem& disk, const std::string& folder) {
  std::vector<std::pair<std::string, int64_t>> files;
  const auto names = disk.List(folder);
  if (!names.ok()) return files;
  for (const std::string& name : *names) {
    const std::string path = checkpoint::JoinPath(folder, name);
    const auto info = disk.Stat(path);
    FSDP_CHECK(info.ok());
    if (info->kind == FileInfo::Kind::kFolder) {
      const auto more = FilesBelow(disk, path);
      files.insert(files.end(), more.begin(), more.end());
    } else if (info->bytes > 0) {
      files.emplace_back(path, info->bytes);
    }
  }
  return files;
}

// Returns "" if there is none.
std::string NewestCheckpoint(FileSystem& disk) {
  std::string newest;
  int64_t newest_step = -1;
  const auto names = disk.List(kRoot);
  if (!names.ok()) return newest;
  for (const std::string& name : *names) {
    absl::string_view rest = name;
    int64_t step = 0;
    if (!absl::ConsumePrefix(&rest, "step-")) continue;
    if (!absl::SimpleAtoi(rest, &step) || step <= newest_step) continue;
    newest_step = step;
    newest = checkpoint::JoinPath(kRoot, name);
  }
  return newest;
}

std::string ReadAll(FileSystem& disk, const std::string& path) {
  const auto file = disk.OpenForReading(path, checkpoint::Caching::kCached);
  FSDP_CHECK(file.ok());
  std::string bytes(disk.Stat(path)->bytes, '\0');
  FSDP_CHECK((*file)->PRead(0, absl::MakeSpan(bytes)).ok());
  return bytes;
}

void Turn(FileSystem& disk, const std::string& path, int64_t bit) {
  std::string bytes = ReadAll(disk, path);
  char& byte = bytes[bit / 8];
  byte = static_cast<char>(byte ^ (1 << (bit % 8)));
  const auto file = disk.OpenForWriting(path, checkpoint::Caching::kCached);
  FSDP_CHECK(file.ok());
  FSDP_CHECK((*file)->PWrite(bit / 8, absl::MakeSpan(&byte, 1)).ok());
  FSDP_CHECK((*file)->Sync().ok());
}

}  // namespace

bool Rot::Flip(FileSystem& disk, int64_t choice) {
  const std::string newest = NewestCheckpoint(disk);
  if (newest.empty()) return false;
  const auto files = FilesBelow(disk, newest);
  if (files.empty()) return false;
  const auto& [path, bytes] = files[choice % int64_t(files.size())];
  path_ = path;
  bit_ = choice * 7919 % (bytes * 8);
  Turn(disk, path_, bit_);
  rotten_ = ReadAll(disk, path_);
  return true;
}

void Rot::FlipBack(FileSystem& disk) {
  if (path_.empty()) return;
  // A checkpoint saved meanwhile may have taken its place.
  if (disk.Stat(path_).ok() && ReadAll(disk, path_) == rotten_)
    Turn(disk, path_, bit_);
  path_.clear();
}

}  // namespace fsdp::simulation
