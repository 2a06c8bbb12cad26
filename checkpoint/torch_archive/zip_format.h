// Numbers of zip files, as APPNOTE.TXT of PKWARE has them.
#ifndef CHECKPOINT_TORCH_ARCHIVE_ZIP_FORMAT_H_
#define CHECKPOINT_TORCH_ARCHIVE_ZIP_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint::zip {

// All begin with "PK" and two bytes.
inline constexpr uint32_t kLocalHeader = 0x04034b50;
inline constexpr uint32_t kDescriptor = 0x08074b50;
inline constexpr uint32_t kCentralHeader = 0x02014b50;
inline constexpr uint32_t kEnd64 = 0x06064b50;
inline constexpr uint32_t kEnd64Locator = 0x07064b50;
inline constexpr uint32_t kEnd = 0x06054b50;

inline constexpr int64_t kLocalHeaderBytes = 30;
inline constexpr int64_t kCentralHeaderBytes = 46;
inline constexpr int64_t kEnd64Bytes = 56;
inline constexpr int64_t kEnd64LocatorBytes = 20;
inline constexpr int64_t kEndBytes = 22;

inline constexpr uint16_t kEncryptedFlag = 0x0001;
inline constexpr uint16_t kDescriptorFlag = 0x0008;
inline constexpr uint16_t kUtf8Flag = 0x0800;
inline constexpr uint16_t kExtra64 = 0x0001;   // sizes of 64 bits
inline constexpr uint32_t kIn64 = 0xffffffff;  // the size stands there
inline constexpr uint16_t kCountIn64 = 0xffff;

// Little-endian, of 8 bytes at most; `at` + bytes <= text.size().
inline uint64_t Get(absl::string_view text, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= uint64_t{static_cast<uint8_t>(text[at + i])} << (8 * i);
  }
  return value;
}

inline void Put(std::string& text, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(value >> (8 * i)));
  }
}

}  // namespace fsdp::checkpoint::zip

#endif  // CHECKPOINT_TORCH_ARCHIVE_ZIP_FORMAT_H_
