#include "base/json.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kMaxDepth = 64;
constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Counts the first bytes that are ASCII and need no escape, as most text is.
size_t PlainLength(absl::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const auto c = static_cast<unsigned char>(text[length]);
    if (c < 0x20 || c >= 0x7F || c == '"' || c == '\\') break;
    ++length;
  }
  return length;
}

void AppendQuoted(absl::string_view text, std::string& out) {
  constexpr char kHex[] = "0123456789abcdef";
  out.push_back('"');
  while (true) {
    const size_t plain = PlainLength(text);
    out.append(text.data(), plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const size_t length = Utf8Length(text);
    const char c = text.front();
    if (length == 0) {
      absl::StrAppend(&out, kReplacement);
    } else if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", text.substr(0, 1));
    } else if (c == '\n') {
      absl::StrAppend(&out, "\\n");
    } else if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      absl::StrAppend(&out, "\\u00", std::string(1, kHex[c >> 4]),
                      std::string(1, kHex[c & 15]));
    } else {
      absl::StrAppend(&out, text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out.push_back('"');
}

void AppendDouble(double value, std::string& out) {
  if (!std::isfinite(value)) {
    absl::StrAppend(&out, "null");
    return;
  }
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  const absl::string_view digits(buffer, end - buffer);
  absl::StrAppend(&out, digits);
  // Otherwise it would be read back as an integer.
  if (digits.find_first_of(".e") == absl::string_view::npos) {
    absl::StrAppend(&out, ".0");
  }
}

// Reads spaces, signs, strings and numbers from the beginning of a text.
class Scanner {
 public:
  explicit Scanner(absl::string_view text) : text_(text) {}

  absl::Status Error(absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("JSON, byte ", position_, ": ", what));
  }

  absl::Status End() {
    SkipSpace();
    return position_ == text_.size() ? absl::OkStatus()
                                     : Error("text after the value");
  }

  bool is_at_end() const { return position_ == text_.size(); }
  char Peek() const {
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  bool Consume(absl::string_view token) {
    if (!absl::StartsWith(text_.substr(position_), token)) return false;
    position_ += token.size();
    return true;
  }
  void SkipSpace() {
    while (position_ < text_.size() &&
           absl::StrContains(" \t\n\r", text_[position_])) {
      ++position_;
    }
  }

  absl::StatusOr<std::string> String() {
    if (!Consume("\"")) return Error("expected a string");
    std::string out;
    while (true) {
      const size_t plain = PlainLength(text_.substr(position_));
      out.append(text_.data() + position_, plain);
      position_ += plain;
      if (Consume("\"")) break;
      if (Consume("\\")) {
        FSDP_RETURN_IF_ERROR(Escape(out));
        continue;
      }
      const size_t length = Utf8Length(text_.substr(position_));
      if (length == 0) return Error("the string ends early or is not UTF-8");
      if (static_cast<unsigned char>(Peek()) < 0x20) {
        return Error("a control character in a string");
      }
      out.append(text_.data() + position_, length);
      position_ += length;
    }
    return out;
  }

  absl::StatusOr<Json> Number() {
    const size_t begin = position_;
    bool integral = true;
    Consume("-");
    if (!Consume("0") && !Digits()) return Error("expected a value");
    if (Consume(".")) {
      integral = false;
      if (!Digits()) return Error("expected digits after '.'");
    }
    if (Consume("e") || Consume("E")) {
      integral = false;
      if (!Consume("+")) Consume("-");
      if (!Digits()) return Error("expected digits of an exponent");
    }
    const absl::string_view digits = text_.substr(begin, position_ - begin);
    const char* end = digits.data() + digits.size();
    int64_t integer = 0;
    if (integral &&
        std::from_chars(digits.data(), end, integer).ec == std::errc()) {
      return Json(integer);
    }
    double value = 0;
    if (std::from_chars(digits.data(), end, value).ec != std::errc()) {
      return Error("a number out of range");
    }
    return Json(value);
  }

 private:
  absl::Status Escape(std::string& out) {
    constexpr absl::string_view kNames = "\"\\/bfnrt";
    constexpr absl::string_view kValues = "\"\\/\b\f\n\r\t";
    const size_t which = kNames.find(Peek());
    if (position_ < text_.size() && which != absl::string_view::npos) {
      out.push_back(kValues[which]);
      ++position_;
      return absl::OkStatus();
    }
    if (!Consume("u")) return Error("unknown escape");
    FSDP_ASSIGN_OR_RETURN(unsigned code, FourHexDigits());
    if (code >= 0xDC00 && code < 0xE000) return Error("half a surrogate pair");
    if (code >= 0xD800 && code < 0xDC00) {
      if (!Consume("\\u")) return Error("half a surrogate pair");
      FSDP_ASSIGN_OR_RETURN(unsigned low, FourHexDigits());
      if (low < 0xDC00 || low >= 0xE000) return Error("half a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    AppendUtf8(code, out);
    return absl::OkStatus();
  }

  absl::StatusOr<unsigned> FourHexDigits() {
    const absl::string_view digits = text_.substr(position_, 4);
    const char* end = digits.data() + digits.size();
    unsigned code = 0;
    const auto result = std::from_chars(digits.data(), end, code, 16);
    if (digits.size() != 4 || result.ec != std::errc() || result.ptr != end) {
      return Error("expected four hexadecimal digits");
    }
    position_ += 4;
    return code;
  }

  bool Digits() {
    const size_t begin = position_;
    while (absl::ascii_isdigit(static_cast<unsigned char>(Peek()))) {
      ++position_;
    }
    return position_ > begin;
  }

  const absl::string_view text_;
  size_t position_ = 0;
};

// Recursive descent; one function per production.
class Parser {
 public:
  using Visit = absl::FunctionRef<absl::Status(std::string key, Json value)>;

  Parser(absl::string_view text, int64_t max_values)
      : scanner_(text), max_values_(max_values), values_left_(max_values) {}

  absl::StatusOr<Json> Document() {
    FSDP_ASSIGN_OR_RETURN(Json value, Value(0));
    FSDP_RETURN_IF_ERROR(scanner_.End());
    return value;
  }

  // `opened` is null if no member is opened.
  absl::Status Members(const absl::string_view* opened, Visit visit,
                       Visit visit_opened) {
    FSDP_RETURN_IF_ERROR(ForEachKey([&](std::string key) -> absl::Status {
      scanner_.SkipSpace();
      if (opened == nullptr || key != *opened || scanner_.Peek() != '{') {
        return Member(/*depth=*/1, std::move(key), visit);
      }
      FSDP_RETURN_IF_ERROR(visit(std::move(key), Json(Json::Object())));
      return ForEachKey([&](std::string inner) {
        return Member(/*depth=*/2, std::move(inner), visit_opened);
      });
    }));
    return scanner_.End();
  }

 private:
  // Reads from the bracket `open` to `close`. In front of each item it calls
  // `take`, which has to consume the item.
  absl::Status ForEachItem(absl::string_view open, absl::string_view close,
                           absl::FunctionRef<absl::Status()> take) {
    scanner_.SkipSpace();
    if (!scanner_.Consume(open)) return scanner_.Error("expected an object");
    scanner_.SkipSpace();
    if (scanner_.Consume(close)) return absl::OkStatus();
    do {
      FSDP_RETURN_IF_ERROR(take());
      scanner_.SkipSpace();
    } while (scanner_.Consume(","));
    if (scanner_.Consume(close)) return absl::OkStatus();
    return scanner_.Error(absl::StrCat("expected ',' or '", close, "'"));
  }

  // Reads an object. In front of each value it calls `take(key)`, which has to
  // consume the value.
  absl::Status ForEachKey(absl::FunctionRef<absl::Status(std::string)> take) {
    absl::flat_hash_set<std::string> keys;
    return ForEachItem("{", "}", [&]() -> absl::Status {
      scanner_.SkipSpace();
      FSDP_ASSIGN_OR_RETURN(std::string key, scanner_.String());
      scanner_.SkipSpace();
      if (!scanner_.Consume(":")) return scanner_.Error("expected ':'");
      if (!keys.insert(key).second) {
        return scanner_.Error(absl::StrCat("key \"", key, "\" is given twice"));
      }
      return take(std::move(key));
    });
  }

  absl::Status Member(int depth, std::string key, Visit visit) {
    values_left_ = max_values_;
    FSDP_ASSIGN_OR_RETURN(Json value, Value(depth));
    return visit(std::move(key), std::move(value));
  }

  absl::StatusOr<Json> Value(int depth) {
    if (depth > kMaxDepth) return scanner_.Error("nested too deep");
    if (--values_left_ < 0) {
      return scanner_.Error(absl::StrCat("more than ", max_values_, " values"));
    }
    scanner_.SkipSpace();
    if (scanner_.is_at_end()) return scanner_.Error("the text ends early");
    switch (scanner_.Peek()) {
      case '{':
        return ObjectValue(depth);
      case '[':
        return ArrayValue(depth);
      case '"': {
        FSDP_ASSIGN_OR_RETURN(std::string text, scanner_.String());
        return Json(std::move(text));
      }
      default:
        break;
    }
    if (scanner_.Consume("true")) return Json(true);
    if (scanner_.Consume("false")) return Json(false);
    if (scanner_.Consume("null")) return Json();
    return scanner_.Number();
  }

  absl::StatusOr<Json> ObjectValue(int depth) {
    Json::Object object;
    FSDP_RETURN_IF_ERROR(ForEachKey([&](std::string key) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Json value, Value(depth + 1));
      object.emplace_back(std::move(key), std::move(value));
      return absl::OkStatus();
    }));
    return Json(std::move(object));
  }

  absl::StatusOr<Json> ArrayValue(int depth) {
    Json::Array array;
    FSDP_RETURN_IF_ERROR(ForEachItem("[", "]", [&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(array.emplace_back(), Value(depth + 1));
      return absl::OkStatus();
    }));
    return Json(std::move(array));
  }

  Scanner scanner_;
  const int64_t max_values_;
  int64_t values_left_;  // in the value that is being parsed
};

}  // namespace

absl::StatusOr<Json> Json::Parse(absl::string_view text) {
  return Parser(text, std::numeric_limits<int64_t>::max()).Document();
}

absl::Status Json::ParseMembers(
    absl::string_view text, int64_t max_values,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit) {
  return Parser(text, max_values).Members(/*opened=*/nullptr, visit, visit);
}

absl::Status ParseMembers(
    absl::string_view text, absl::string_view opened, int64_t max_values,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit_opened) {
  return Parser(text, max_values).Members(&opened, visit, visit_opened);
}

std::string Json::ToString() const {
  std::string out;
  AppendTo(out);
  return out;
}

const Json* Json::Find(absl::string_view key) const {
  const Object* object = As<Object>();
  if (object == nullptr) return nullptr;
  for (const auto& [name, value] : *object) {
    if (name == key) return &value;
  }
  return nullptr;
}

double Json::NumberOr(double otherwise) const {
  if (const int64_t* integer = As<int64_t>()) {
    return static_cast<double>(*integer);
  }
  const double* number = As<double>();
  return number == nullptr ? otherwise : *number;
}

void Json::AppendTo(std::string& out) const {
  if (const bool* boolean = As<bool>()) {
    absl::StrAppend(&out, *boolean ? "true" : "false");
  } else if (const int64_t* integer = As<int64_t>()) {
    absl::StrAppend(&out, *integer);
  } else if (const double* number = As<double>()) {
    AppendDouble(*number, out);
  } else if (const std::string* text = As<std::string>()) {
    AppendQuoted(*text, out);
  } else if (const Array* array = As<Array>()) {
    out.push_back('[');
    for (size_t i = 0; i < array->size(); ++i) {
      if (i > 0) absl::StrAppend(&out, ", ");
      (*array)[i].AppendTo(out);
    }
    out.push_back(']');
  } else if (const Object* object = As<Object>()) {
    out.push_back('{');
    for (size_t i = 0; i < object->size(); ++i) {
      if (i > 0) absl::StrAppend(&out, ", ");
      AppendQuoted((*object)[i].first, out);
      absl::StrAppend(&out, ": ");
      (*object)[i].second.AppendTo(out);
    }
    out.push_back('}');
  } else {
    absl::StrAppend(&out, "null");
  }
}

size_t Utf8Length(absl::string_view text) {
  const auto byte = [text](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const auto continues = [&byte](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return text.empty() ? 0 : 1;
  if (first < 0xC2) return 0;  // a continuation or an overlong form
  if (first < 0xE0) return continues(1) ? 2 : 0;
  if (first < 0xF0) {
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) >= 0xA0;
    return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first > 0xF4) return 0;
  const bool overlong = first == 0xF0 && byte(1) < 0x90;
  const bool too_large = first == 0xF4 && byte(1) >= 0x90;
  return continues(1) && continues(2) && continues(3) && !overlong && !too_large
             ? 4
             : 0;
}

void AppendUtf8(unsigned code, std::string& out) {
  constexpr unsigned kFirst[] = {0, 0xC0, 0xE0, 0xF0};
  int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  out.push_back(static_cast<char>(kFirst[more] | code >> (6 * more)));
  while (more-- > 0) {
    out.push_back(static_cast<char>(0x80 | (code >> (6 * more) & 0x3F)));
  }
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace fsdp
