#include "testing/simulation/seed_message.h"

#include <cstring>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::simulation {
namespace {

void Append(std::string& out, uint64_t number) {
  char bytes[sizeof(number)];
  std::memcpy(bytes, &number, sizeof(number));
  out.append(bytes, sizeof(number));
}

void Append(std::string& out, absl::string_view text) {
  Append(out, text.size());
  out.append(text.data(), text.size());
}

// Reads what Append() wrote; is not good() once something is missing.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  uint64_t Number() {
    uint64_t number = 0;
    const absl::string_view bytes = Take(sizeof(number));
    if (good_) std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  }
  std::string Text() { return std::string(Take(Number())); }
  bool good() const { return good_; }
  size_t left() const { return rest_.size(); }

 private:
  absl::string_view Take(size_t size) {
    good_ = good_ && size <= rest_.size();
    if (!good_) return {};
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  absl::string_view rest_;
  bool good_ = true;
};

}  // namespace

std::string ToBytes(const SeedMessage& message) {
  const SeedResult& result = message.result;
  std::string out;
  Append(out, static_cast<uint64_t>(message.seed));
  Append(out, result.log_hash);
  Append(out, static_cast<uint64_t>(result.events));
  Append(out, result.problem);
  Append(out, result.features.size());
  for (const std::string& feature : result.features) Append(out, feature);
  return out;
}

std::optional<SeedMessage> TakeMessage(std::string& bytes) {
  Reader reader(bytes);
  SeedMessage message;
  message.seed = static_cast<int64_t>(reader.Number());
  message.result.log_hash = reader.Number();
  message.result.events = static_cast<int64_t>(reader.Number());
  message.result.problem = reader.Text();
  const uint64_t features = reader.Number();
  for (uint64_t i = 0; i < features && reader.good(); ++i) {
    message.result.features.push_back(reader.Text());
  }
  if (!reader.good()) return std::nullopt;
  bytes.erase(0, bytes.size() - reader.left());
  return message;
}

}  // namespace fsdp::simulation
