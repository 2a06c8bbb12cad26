// What replicas let each other know, in registers.
#ifndef REPLICAS_MEMBERSHIP_NOTICE_BOARD_H_
#define REPLICAS_MEMBERSHIP_NOTICE_BOARD_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

// Used by one thread at a time. Errors are those of Registers.
class NoticeBoard {
 public:
  struct Pending {
    std::vector<Notice> notices;
    int64_t seen = 0;
  };

  // `registers` outlives it.
  explicit NoticeBoard(Registers* registers) : registers_(registers) {}

  // The number of a notice that is to be written. It is lost where a roster has
  // seen that number before.
  absl::StatusOr<int64_t> Reserve();
  // May be repeated, with the same notice.
  absl::Status Write(int64_t number, const Notice& notice);
  // Those after number `after`, up to `seen`. Asks for none twice, but for
  // those that are not there, or are none. FailedPrecondition: there were more
  // once.
  absl::StatusOr<Pending> ReadAfter(int64_t after);
  // Those after `after`, up to `seen`, are of no more use to anybody.
  void Forget(int64_t after, int64_t seen);

 private:
  Registers* const registers_;
  std::map<int64_t, Notice> known_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_NOTICE_BOARD_H_
