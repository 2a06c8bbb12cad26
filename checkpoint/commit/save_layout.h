// Into which files a checkpoint goes, and when they count as one.
#ifndef CHECKPOINT_COMMIT_SAVE_LAYOUT_H_
#define CHECKPOINT_COMMIT_SAVE_LAYOUT_H_

namespace fsdp::checkpoint {

// Selects when the files of a checkpoint count as one.
enum class CommitBy {
  // They do when their folder is renamed: it has another name while they are
  // written. A lock keeps a second run out of the run's folder.
  kRename,
  // They do when their manifest is there. It is written last, and their folder
  // has its final name from the beginning. This suits storage that cannot
  // rename folders, such as a mounted object store: files are made once and
  // whole, and never renamed, locked or overwritten. Nothing keeps a second run
  // out.
  kManifest,
};

// Selects who writes which files of a checkpoint.
enum class SaveLayout {
  // All ranks write their ranges of the same files, which do not depend on the
  // number of ranks.
  kShared,
  // Each rank writes its own files, front to back. This suits storage without
  // random writes, such as a mounted object store.
  kPerRank,
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_SAVE_LAYOUT_H_
