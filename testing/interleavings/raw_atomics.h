// The processor's atomic operations, seq_cst, on 1, 2, 4 or 8 bytes.
#ifndef TESTING_INTERLEAVINGS_RAW_ATOMICS_H_
#define TESTING_INTERLEAVINGS_RAW_ATOMICS_H_

#include <cstdint>

namespace fsdp::interleavings {

uint64_t RawLoad(uintptr_t address, int bytes);
void RawStore(uintptr_t address, int bytes, uint64_t value);
// Returns the old value, from which `modify` makes the new one.
uint64_t RawUpdate(uintptr_t address, int bytes,
                   uint64_t (*modify)(uint64_t old, uint64_t operand),
                   uint64_t operand);
bool RawCompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                        uint64_t desired);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_RAW_ATOMICS_H_
