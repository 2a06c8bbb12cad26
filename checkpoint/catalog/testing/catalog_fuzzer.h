// The readers of catalogs under libFuzzer, whose flags come before DIR, which
// keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/catalog/testing:catalog_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#ifndef CHECKPOINT_CATALOG_TESTING_CATALOG_FUZZER_H_
#define CHECKPOINT_CATALOG_TESTING_CATALOG_FUZZER_H_

#include <cstddef>
#include <cstdint>

// 8 bytes, which say how much data the file has, a text of sharding info, a NUL
// and a JSON header, whose own sharding info counts where the text is empty.
// The runs of what is accepted fill each tensor from inside the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_CATALOG_TESTING_CATALOG_FUZZER_H_
