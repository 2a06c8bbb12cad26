// Reads pickles without running what they ask for.
#ifndef CHECKPOINT_PICKLE_UNPICKLER_H_
#define CHECKPOINT_PICKLE_UNPICKLER_H_

#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"

namespace fsdp::checkpoint {

// How deep values may lie in each other. Those who walk a document may recurse.
inline constexpr int kMaxPickleDepth = 200;

// Protocols 2 to 5, as Python writes them: nothing of protocols 0 and 1
// besides, no sets, no extension codes, no buffers out of band. Globals become
// names, calls of them kObject: nothing is looked up, imported or executed.
// Time and memory are in proportion to the pickle's size.
//
// InvalidArgument for what is no such pickle, names a global that `allowed`
// lacks or has an integer of more than 64 bits; for cycles, nesting deeper than
// kMaxPickleDepth, and references that blow up what is a few bytes here.
absl::StatusOr<Document> Unpickle(std::string bytes, const AllowList& allowed);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_PICKLE_UNPICKLER_H_
