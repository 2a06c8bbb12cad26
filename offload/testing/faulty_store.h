// A store that fails, hesitates or does half of its work when a test wants it.
#ifndef OFFLOAD_TESTING_FAULTY_STORE_H_
#define OFFLOAD_TESTING_FAULTY_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// Which operations fail, and how.
struct Fault {
  enum class Operation { kAny, kRead, kWrite, kFlush };
  Operation operation = Operation::kAny;
  std::optional<std::string> region;  // only of this one
  // Of those that fit: `count` of them, the first one being the `nth` from 0.
  int64_t nth = 0;
  int64_t count = 1;

  enum class Effect {
    kRefuse,   // the call returns `error`
    kFail,     // nothing is done; Wait() returns `error`
    kShorten,  // the first half is done; Wait() returns `error`
    kDelay,    // all is done; Wait() returns `delay` after the start at the
               // earliest
  };
  Effect effect = Effect::kFail;
  absl::Status error = absl::UnavailableError("injected failure");
  absl::Duration delay = absl::Milliseconds(1);
};

// Of any region; see Fault.
Fault FaultOf(Fault::Operation operation, Fault::Effect effect, int64_t nth,
              int64_t count = 1);

// Passes everything on to `base` but for what fits one of `faults`, of which
// the first counts. What a write that failed did not reach still has its old
// bytes, and no read says so.
std::unique_ptr<ParamStore> WithFaults(std::unique_ptr<ParamStore> base,
                                       std::vector<Fault> faults);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FAULTY_STORE_H_
