#include "base/files/testing/simulated_file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/status_macros.h"

namespace fsdp::testing {
namespace {

std::string NameIn(const std::string& path) {
  return std::string(LastPart(path));
}

absl::Status Killed(const std::string& path) {
  return absl::AbortedError(
      absl::StrCat(path, " was open in a process that is no more"));
}

constexpr int64_t kSimulatedPage = 4096;

bool Coin(std::mt19937_64& random) { return (random() & 1) != 0; }

// Returns the group of each name; names that a rename joins are in one.
std::map<std::string, std::string> Groups(
    const std::vector<std::pair<std::string, std::string>>& renamed) {
  std::map<std::string, std::string> groups;
  for (const auto& [from, to] : renamed) {
    const std::string one = groups.emplace(from, from).first->second;
    const std::string other = groups.emplace(to, to).first->second;
    for (auto& [name, group] : groups) {
      if (group == other) group = one;
    }
  }
  return groups;
}

using Entries =
    std::map<std::string, std::shared_ptr<SimulatedFileSystem::Node>>;

}  // namespace

// A file or a folder: as programs see it, and as it is on the disk for sure.
struct SimulatedFileSystem::Node {
  bool is_folder = false;

  std::string bytes;
  std::string synced_bytes;
  std::set<int64_t> dirty_pages;  // since the last Sync()

  Entries entries;
  std::vector<Entries> since_sync;  // before each change; front(): synced
  std::vector<std::pair<std::string, std::string>> renamed;  // since sync

  // Is called before a change of `entries`.
  void Remember() { since_sync.push_back(entries); }

  void Synced() {
    synced_bytes = bytes;
    dirty_pages.clear();
    since_sync.clear();
    renamed.clear();
  }

  // Returns the bytes of all files in it.
  int64_t Bytes() const {
    auto sum = static_cast<int64_t>(bytes.size());
    for (const auto& [name, node] : entries) sum += node->Bytes();
    return sum;
  }

  // Makes it and everything below it what a loss of power leaves.
  void LosePower(std::mt19937_64& random) {
    if (!is_folder) {
      LosePages(random);
      return;
    }
    LoseEntries(random);
    for (const auto& [name, node] : entries) node->LosePower(random);
  }

 private:
  void LosePages(std::mt19937_64& random) {
    const size_t size = Coin(random) ? bytes.size() : synced_bytes.size();
    std::string left = synced_bytes;
    left.resize(size);
    for (const int64_t page : dirty_pages) {
      const auto begin = static_cast<size_t>(page * kSimulatedPage);
      if (Coin(random) || begin >= std::min(size, bytes.size())) continue;
      const size_t length = std::min<size_t>(
          {kSimulatedPage, size - begin, bytes.size() - begin});
      left.replace(begin, length, bytes, begin, length);
    }
    bytes = left;
    Synced();
  }

  void LoseEntries(std::mt19937_64& random) {
    if (since_sync.empty()) return;
    const Entries before = since_sync.front();
    since_sync.push_back(entries);
    const Entries then = since_sync[random() % since_sync.size()];
    std::map<std::string, std::string> groups = Groups(renamed);
    std::map<std::string, bool> keeps;  // by group
    std::set<std::string> names;
    for (const auto& [name, node] : before) names.insert(name);
    for (const auto& [name, node] : then) names.insert(name);
    entries.clear();
    for (const std::string& name : names) {
      const std::string& group = groups.emplace(name, name).first->second;
      const bool keep = keeps.emplace(group, Coin(random)).first->second;
      const Entries& source = keep ? then : before;
      const auto found = source.find(name);
      if (found != source.end()) entries.insert(*found);
    }
    Synced();
  }
};

class SimulatedFileSystem::OpenFile : public File {
 public:
  OpenFile(SimulatedFileSystem& files, std::shared_ptr<Node> node,
           std::string path, int64_t process, bool writes)
      : files_(files),
        node_(std::move(node)),
        path_(std::move(path)),
        process_(process),
        writes_(writes) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    absl::MutexLock lock(&files_.mutex_);
    FSDP_RETURN_IF_ERROR(CheckAlive());
    if (writes_) return FileError(EBADF, "read", path_);
    const auto size = static_cast<int64_t>(node_->bytes.size());
    const auto wanted = static_cast<int64_t>(out.size());
    const int64_t found = std::clamp<int64_t>(size - offset, 0, wanted);
    if (found > 0) std::memcpy(out.data(), &node_->bytes[offset], found);
    if (found == wanted) return absl::OkStatus();
    return EndsEarly(path_, offset, wanted, found);
  }

  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    absl::MutexLock lock(&files_.mutex_);
    FSDP_RETURN_IF_ERROR(CheckWrites("write"));
    const auto end = offset + static_cast<int64_t>(bytes.size());
    if (end > static_cast<int64_t>(node_->bytes.size())) {
      FSDP_RETURN_IF_ERROR(Resize("write", end));
    }
    if (bytes.empty()) return absl::OkStatus();
    std::memcpy(&node_->bytes[offset], bytes.data(), bytes.size());
    MarkDirty(offset, end);
    return absl::OkStatus();
  }

  absl::Status SetSize(int64_t bytes) override {
    absl::MutexLock lock(&files_.mutex_);
    FSDP_RETURN_IF_ERROR(CheckWrites("set the size of"));
    const auto before = static_cast<int64_t>(node_->bytes.size());
    FSDP_RETURN_IF_ERROR(Resize("set the size of", bytes));
    MarkDirty(std::min(before, bytes), std::max(before, bytes));
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    absl::MutexLock lock(&files_.mutex_);
    FSDP_RETURN_IF_ERROR(CheckAlive());
    node_->Synced();
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Size() override {
    absl::MutexLock lock(&files_.mutex_);
    FSDP_RETURN_IF_ERROR(CheckAlive());
    return static_cast<int64_t>(node_->bytes.size());
  }

 private:
  absl::Status CheckAlive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_.mutex_) {
    return process_ == files_.process_ ? absl::OkStatus() : Killed(path_);
  }
  absl::Status CheckWrites(absl::string_view what) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_.mutex_) {
    FSDP_RETURN_IF_ERROR(CheckAlive());
    return writes_ ? absl::OkStatus() : FileError(EBADF, what, path_);
  }
  absl::Status Resize(absl::string_view what, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_.mutex_) {
    const int64_t more = bytes - static_cast<int64_t>(node_->bytes.size());
    if (files_.used_bytes_ + more > files_.capacity_bytes_) {
      return FileError(ENOSPC, what, path_);
    }
    files_.used_bytes_ += more;
    node_->bytes.resize(bytes);
    return absl::OkStatus();
  }
  void MarkDirty(int64_t begin, int64_t end)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(files_.mutex_) {
    for (int64_t page = begin / kSimulatedPage; page * kSimulatedPage < end;
         ++page) {
      node_->dirty_pages.insert(page);
    }
  }

  SimulatedFileSystem& files_;
  const std::shared_ptr<Node> node_;
  const std::string path_;
  const int64_t process_;
  const bool writes_;
};

class SimulatedFileSystem::HeldLock {
 public:
  HeldLock(SimulatedFileSystem& files, std::shared_ptr<Node> node,
           int64_t process)
      : files_(files), node_(std::move(node)), process_(process) {}
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;
  ~HeldLock() {
    absl::MutexLock lock(&files_.mutex_);
    if (process_ == files_.process_) files_.locked_.erase(node_.get());
  }

 private:
  SimulatedFileSystem& files_;
  const std::shared_ptr<Node> node_;
  const int64_t process_;
};

SimulatedFileSystem::SimulatedFileSystem(int64_t capacity_bytes)
    : capacity_bytes_(capacity_bytes), root_(std::make_shared<Node>()) {
  root_->is_folder = true;
}

SimulatedFileSystem::~SimulatedFileSystem() = default;

void SimulatedFileSystem::KillProcess() {
  absl::MutexLock lock(&mutex_);
  ++process_;
  locked_.clear();
}

void SimulatedFileSystem::LosePower(uint64_t seed) {
  KillProcess();
  absl::MutexLock lock(&mutex_);
  std::mt19937_64 random(seed);
  root_->LosePower(random);
  used_bytes_ = root_->Bytes();
}

std::shared_ptr<SimulatedFileSystem::Node> SimulatedFileSystem::Find(
    absl::string_view path) const {
  std::shared_ptr<Node> node = root_;
  for (const absl::string_view name :
       absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (name == ".") continue;
    const auto found = node->entries.find(std::string(name));
    if (found == node->entries.end()) return nullptr;
    node = found->second;
  }
  return node;
}

absl::StatusOr<std::shared_ptr<SimulatedFileSystem::Node>>
SimulatedFileSystem::FolderAt(absl::string_view what,
                              const std::string& path) const {
  std::shared_ptr<Node> folder = Find(path);
  if (folder == nullptr) return FileError(ENOENT, what, path);
  if (!folder->is_folder) return FileError(ENOTDIR, what, path);
  return folder;
}

absl::StatusOr<std::shared_ptr<SimulatedFileSystem::Node>>
SimulatedFileSystem::FileAt(const std::string& path, bool create) {
  std::shared_ptr<Node> node = Find(path);
  if (node == nullptr && create) {
    FSDP_ASSIGN_OR_RETURN(const auto folder, FolderAt("open", FolderOf(path)));
    folder->Remember();
    node = folder->entries[NameIn(path)] = std::make_shared<Node>();
  }
  if (node == nullptr) return FileError(ENOENT, "open", path);
  if (node->is_folder) return FileError(EISDIR, "open", path);
  return node;
}

absl::StatusOr<std::unique_ptr<File>> SimulatedFileSystem::OpenForReading(
    const std::string& path, Caching /*caching*/) {
  absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Node> node, FileAt(path, false));
  return absl::make_unique<OpenFile>(*this, std::move(node), path, process_,
                                     /*writes=*/false);
}

absl::StatusOr<std::unique_ptr<File>> SimulatedFileSystem::OpenForWriting(
    const std::string& path, Caching /*caching*/) {
  absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Node> node, FileAt(path, true));
  return absl::make_unique<OpenFile>(*this, std::move(node), path, process_,
                                     /*writes=*/true);
}

absl::StatusOr<bool> SimulatedFileSystem::MakeFolder(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  if (const std::shared_ptr<Node> found = Find(path)) {
    if (found->is_folder) return false;
    return FileError(ENOTDIR, "make folder", path);
  }
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Node> parent,
                        FolderAt("make folder", FolderOf(path)));
  parent->Remember();
  auto folder = std::make_shared<Node>();
  folder->is_folder = true;
  parent->entries[NameIn(path)] = std::move(folder);
  return true;
}

absl::Status SimulatedFileSystem::Rename(const std::string& from,
                                         const std::string& to) {
  absl::MutexLock lock(&mutex_);
  const std::string what = absl::StrCat("rename ", from, " to");
  FSDP_ASSIGN_OR_RETURN(const auto folder, FolderAt(what, FolderOf(from)));
  const std::shared_ptr<Node> moved = Find(from);
  if (moved == nullptr) return FileError(ENOENT, what, to);
  if (FolderOf(to) != FolderOf(from)) return FileError(EXDEV, what, to);
  if (const std::shared_ptr<Node> there = Find(to)) {
    if (there == moved) return absl::OkStatus();
    if (there->is_folder && !moved->is_folder) {
      return FileError(EISDIR, what, to);
    }
    if (!there->is_folder && moved->is_folder) {
      return FileError(ENOTDIR, what, to);
    }
    if (!there->entries.empty()) return FileError(ENOTEMPTY, what, to);
    used_bytes_ -= static_cast<int64_t>(there->bytes.size());
  }
  folder->Remember();
  folder->renamed.emplace_back(NameIn(from), NameIn(to));
  folder->entries.erase(NameIn(from));
  folder->entries[NameIn(to)] = moved;
  return absl::OkStatus();
}

absl::Status SimulatedFileSystem::Remove(absl::string_view what,
                                         const std::string& path, bool folder) {
  const std::shared_ptr<Node> node = Find(path);
  if (node == nullptr) return FileError(ENOENT, what, path);
  if (node->is_folder != folder) {
    return FileError(folder ? ENOTDIR : EISDIR, what, path);
  }
  if (!node->entries.empty()) return FileError(ENOTEMPTY, what, path);
  const std::shared_ptr<Node> parent = Find(FolderOf(path));
  parent->Remember();
  parent->entries.erase(NameIn(path));
  used_bytes_ -= static_cast<int64_t>(node->bytes.size());
  return absl::OkStatus();
}

absl::Status SimulatedFileSystem::RemoveFile(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  return Remove("remove", path, /*folder=*/false);
}

absl::Status SimulatedFileSystem::RemoveFolder(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  return Remove("remove folder", path, /*folder=*/true);
}

absl::Status SimulatedFileSystem::SyncFolder(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(const auto folder, FolderAt("open folder", path));
  folder->Synced();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> SimulatedFileSystem::List(
    const std::string& folder) {
  absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(const auto node, FolderAt("list", folder));
  std::vector<std::string> names;
  for (const auto& [name, entry] : node->entries) names.push_back(name);
  return names;
}

absl::StatusOr<FileInfo> SimulatedFileSystem::Stat(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  const std::shared_ptr<Node> node = Find(path);
  if (node == nullptr) return FileError(ENOENT, "stat", path);
  if (node->is_folder) return FileInfo{FileInfo::Kind::kFolder, 0};
  return FileInfo{FileInfo::Kind::kFile,
                  static_cast<int64_t>(node->bytes.size())};
}

absl::StatusOr<int64_t> SimulatedFileSystem::FreeBytes(
    const std::string& folder) {
  absl::MutexLock lock(&mutex_);
  FSDP_RETURN_IF_ERROR(FolderAt("see how much is free in", folder).status());
  return capacity_bytes_ - used_bytes_;
}

absl::StatusOr<FileLock> SimulatedFileSystem::Lock(const std::string& path,
                                                   absl::string_view holder) {
  absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Node> node, FileAt(path, true));
  if (!locked_.insert(node.get()).second) {
    return absl::FailedPreconditionError(
        absl::StrCat("lock ", path, ": somebody else has it: ", node->bytes));
  }
  used_bytes_ += static_cast<int64_t>(holder.size() - node->bytes.size());
  node->bytes = std::string(holder);
  node->dirty_pages.insert(0);
  return std::make_shared<HeldLock>(*this, std::move(node), process_);
}

}  // namespace fsdp::testing
