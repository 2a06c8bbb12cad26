// A store's end of a connection under libFuzzer, whose flags, such as
// -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //comm/meeting/testing:store_session_fuzz -- DIR
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/meeting/store_message.h"
#include "comm/meeting/store_server.h"

namespace fsdp::comm {
namespace {

constexpr char kSecret[] = "secret";
constexpr size_t kTableBytes = size_t{1} << 16;

std::string Claim(const std::string& listener_nonce) {
  const std::string nonce(kNonceBytes, 'c');
  return absl::StrCat(kStoreMagic, nonce,
                      CallerProof(kSecret, listener_nonce, nonce));
}

// Does what a store does that sends everything at once; false: hangs up.
bool SendAll(StoreSession& session, absl::Time now) {
  while (!session.output().empty()) {
    // There is one answer at a time, of what the table has.
    FSDP_CHECK(session.output().size() <=
               kGreetingBytes + kWelcomeBytes + kTableBytes + 64);
    session.output().clear();
    if (!session.Advance(now).ok()) return false;
  }
  return true;
}

void Play(absl::string_view bytes, bool is_rank, size_t piece) {
  StoreTable table(kTableBytes);
  const std::string nonce(kNonceBytes, 'l');
  StoreSession session(kSecret, nonce, &table);
  absl::Time now = absl::UnixEpoch();
  if (is_rank) FSDP_CHECK(session.Receive(Claim(nonce), now).ok());
  if (!SendAll(session, now)) return;
  while (!bytes.empty()) {
    now += absl::Milliseconds(1);
    if (!session.Receive(bytes.substr(0, piece), now).ok()) break;
    bytes.remove_prefix(bytes.size() < piece ? bytes.size() : piece);
    if (!SendAll(session, now)) break;
    if (session.is_waiting()) {
      now = session.wait_deadline();
      FSDP_CHECK(session.Advance(now).ok() || !session.is_waiting());
      FSDP_CHECK(!session.is_waiting() || session.wait_deadline() > now);
      if (!SendAll(session, now)) break;
    }
  }
  // Nobody guesses a proof.
  FSDP_CHECK(session.accepted() == is_rank);
  FSDP_CHECK(is_rank || table.size() == 0);
}

}  // namespace
}  // namespace fsdp::comm

// The first byte says how the rest comes: from a rank if it is odd, else from a
// stranger, and in pieces of how many bytes. Stops the program if a stranger
// gets in, or more is kept than there should be.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  fsdp::comm::Play({reinterpret_cast<const char*>(data) + 1, size - 1},
                   data[0] % 2 != 0, size_t{1} + data[0] / 2);
  return 0;
}
