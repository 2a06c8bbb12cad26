// When the files of a step are a checkpoint.
#ifndef CHECKPOINT_COMMIT_COMMIT_BY_H_
#define CHECKPOINT_COMMIT_COMMIT_BY_H_

namespace fsdp::checkpoint {

enum class CommitBy {
  // Once their folder has its name, which is another one while they are
  // written. A lock keeps a second run from the folder of the run.
  kRename,
  // Once their manifest is there, which is written last, into the folder that
  // has its name from the beginning: for storage that renames no folders, such
  // as a mounted object store. Each file is made once and whole, nothing is
  // renamed, locked or written over. Nobody keeps a second run away.
  kManifest,
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_COMMIT_BY_H_
