#include "testing/gpt/data/part_batches.h"

namespace gpt {

Batch PartBatches::Next() {
  Stream& stream = streams_[part_];
  if (stream.source == nullptr) stream.source = make_(part_);
  for (; stream.next < step_; ++stream.next) stream.source->Next();
  ++stream.next;
  return stream.source->Next();
}

}  // namespace gpt
