#include "checkpoint/pickle/pickler.h"

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/pickle/opcodes.h"

namespace fsdp::checkpoint {
namespace {

// Keys of the memo.
std::string GlobalKey(absl::string_view module, absl::string_view name) {
  return absl::StrCat("g", module, "\n", name);
}

std::string TextKey(absl::string_view text) { return absl::StrCat("t", text); }

}  // namespace

Pickler::Pickler(int protocol) : protocol_(protocol) {
  FSDP_CHECK(protocol == 2 || protocol == 4);
  Op(pickle_op::kProto);
  LittleEndian(protocol, 1);
}

void Pickler::None() { Op(pickle_op::kNone); }

void Pickler::Bool(bool value) {
  Op(value ? pickle_op::kNewTrue : pickle_op::kNewFalse);
}

void Pickler::Int(int64_t value) {
  if (value >= 0 && value < 256) {
    Op(pickle_op::kBinInt1);
    LittleEndian(value, 1);
  } else if (value >= 0 && value < 65536) {
    Op(pickle_op::kBinInt2);
    LittleEndian(value, 2);
  } else if (value >= std::numeric_limits<int32_t>::min() &&
             value <= std::numeric_limits<int32_t>::max()) {
    Op(pickle_op::kBinInt);
    LittleEndian(static_cast<uint32_t>(value), 4);
  } else {
    // As few bytes as have the sign, as Python does.
    int bytes = 8;
    while (value >> (8 * (bytes - 1) - 1) == (value < 0 ? -1 : 0)) --bytes;
    Op(pickle_op::kLong1);
    LittleEndian(bytes, 1);
    LittleEndian(static_cast<uint64_t>(value), bytes);
  }
}

void Pickler::Double(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  Op(pickle_op::kBinFloat);
  LittleEndian(__builtin_bswap64(bits), 8);
}

void Pickler::String(absl::string_view text) {
  const std::string key = TextKey(text);
  if (Remembered(key)) return;
  RawString(text);
  Remember(key);
}

void Pickler::RawString(absl::string_view text) {
  constexpr uint64_t kShort = 256;
  if (protocol_ >= 4 && text.size() < kShort) {
    Op(pickle_op::kShortBinUnicode);
    LittleEndian(text.size(), 1);
  } else {
    FSDP_CHECK(text.size() <= std::numeric_limits<uint32_t>::max());
    Op(pickle_op::kBinUnicode);
    LittleEndian(text.size(), 4);
  }
  absl::StrAppend(&bytes_, text);
}

void Pickler::Bytes(absl::string_view bytes) {
  FSDP_CHECK(protocol_ >= 4);
  Op(pickle_op::kBinBytes8);
  LittleEndian(bytes.size(), 8);
  absl::StrAppend(&bytes_, bytes);
}

void Pickler::Global(absl::string_view module, absl::string_view name) {
  const std::string key = GlobalKey(module, name);
  if (Remembered(key)) return;
  if (protocol_ >= 4) {
    String(module);
    String(name);
    Op(pickle_op::kStackGlobal);
  } else {
    Op(pickle_op::kGlobal);
    absl::StrAppend(&bytes_, module, "\n", name, "\n");
  }
  Remember(key);
}

void Pickler::Mark() { Op(pickle_op::kMark); }
void Pickler::Tuple() { Op(pickle_op::kTuple); }
void Pickler::EmptyTuple() { Op(pickle_op::kEmptyTuple); }
void Pickler::EmptyList() { Op(pickle_op::kEmptyList); }
void Pickler::Appends() { Op(pickle_op::kAppends); }
void Pickler::EmptyDict() { Op(pickle_op::kEmptyDict); }
void Pickler::SetItems() { Op(pickle_op::kSetItems); }
void Pickler::Reduce() { Op(pickle_op::kReduce); }
void Pickler::NewObj() { Op(pickle_op::kNewObj); }
void Pickler::Build() { Op(pickle_op::kBuild); }
void Pickler::PersistentId() { Op(pickle_op::kBinPersId); }

std::string Pickler::Finish() && {
  Op(pickle_op::kStop);
  return std::move(bytes_);
}

void Pickler::LittleEndian(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
}

bool Pickler::Remembered(absl::string_view key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) return false;
  const bool is_short = found->second < 256;
  Op(is_short ? pickle_op::kBinGet : pickle_op::kLongBinGet);
  LittleEndian(found->second, is_short ? 1 : 4);
  return true;
}

void Pickler::Remember(absl::string_view key) {
  const auto at = static_cast<uint32_t>(memo_.size());
  memo_.emplace(key, at);
  if (protocol_ >= 4) {
    Op(pickle_op::kMemoize);
  } else {
    const bool is_short = at < 256;
    Op(is_short ? pickle_op::kBinPut : pickle_op::kLongBinPut);
    LittleEndian(at, is_short ? 1 : 4);
  }
}

}  // namespace fsdp::checkpoint
