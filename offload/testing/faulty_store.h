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

// Says which operations fail, and how.
struct Fault {
  enum class Operation { kAny, kRead, kWrite, kFlush };
  Operation operation = Operation::kAny;
  std::optional<std::string> region;  // only of this one
  // The fault hits `count` of the operations that fit, from the `nth` on,
  // counted from 0.
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

// Makes a fault of any region.
Fault FaultOf(Fault::Operation operation, Fault::Effect effect, int64_t nth,
              int64_t count = 1);

// Returns a store that passes everything on to `base` except what fits one of
// `faults`, of which the first counts. Bytes that a failed write has not
// reached stay as they were, and no read says so.
std::unique_ptr<ParamStore> WithFaults(std::unique_ptr<ParamStore> base,
                                       std::vector<Fault> faults);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FAULTY_STORE_H_
