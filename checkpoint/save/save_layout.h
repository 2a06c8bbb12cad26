// Decides into which files a checkpoint goes.
#ifndef CHECKPOINT_SAVE_SAVE_LAYOUT_H_
#define CHECKPOINT_SAVE_SAVE_LAYOUT_H_

namespace fsdp::checkpoint {

enum class SaveLayout {
  // All ranks write their ranges of the same files, which do not depend on the
  // number of ranks.
  kShared,
  // Each rank writes its own files, front to back. This suits storage without
  // random writes, such as a mounted object store.
  kPerRank,
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVE_LAYOUT_H_
