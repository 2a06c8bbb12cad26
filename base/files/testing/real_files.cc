#include "base/files/testing/real_files.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "gtest/gtest.h"

namespace fsdp::testing {

namespace fs = std::filesystem;

std::string FreePath(absl::string_view name) {
  std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  fs::remove_all(path);
  return path;
}

std::string EmptyFolder(absl::string_view name) {
  std::string path = FreePath(name);
  fs::create_directory(path);
  return path;
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  FSDP_CHECK(file.good());
  return std::string(std::istreambuf_iterator<char>(file),
                     std::istreambuf_iterator<char>());
}

std::map<std::string, std::string> ReadFilesBelow(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    files[fs::relative(entry.path(), folder)] = ReadWholeFile(entry.path());
  }
  return files;
}

std::string RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed + static_cast<uint32_t>(size));
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace fsdp::testing
