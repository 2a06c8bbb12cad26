// Decides when the files of a step count as a checkpoint.
#ifndef CHECKPOINT_COMMIT_COMMIT_BY_H_
#define CHECKPOINT_COMMIT_COMMIT_BY_H_

namespace fsdp::checkpoint {

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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_COMMIT_BY_H_
