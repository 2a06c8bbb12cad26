// The classes that `.metadata` is made of.
#ifndef CHECKPOINT_DCP_NAMES_H_
#define CHECKPOINT_DCP_NAMES_H_

namespace fsdp::checkpoint::dcp_names {

inline constexpr char kMetadata[] =
    "torch.distributed.checkpoint.metadata.Metadata";
inline constexpr char kTensor[] =
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
inline constexpr char kBytes[] =
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
inline constexpr char kChunk[] =
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
inline constexpr char kIndex[] =
    "torch.distributed.checkpoint.metadata.MetadataIndex";
inline constexpr char kProperties[] =
    "torch.distributed.checkpoint.metadata.TensorProperties";
inline constexpr char kMemoryFormat[] =
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING";
inline constexpr char kStorageMeta[] =
    "torch.distributed.checkpoint.metadata.StorageMeta";
inline constexpr char kStorageInfo[] =
    "torch.distributed.checkpoint.filesystem._StorageInfo";
inline constexpr char kLayout[] = "torch.serialization._get_layout";
inline constexpr char kSize[] = "torch.Size";
// Of torch before 2.3.
inline constexpr char kOldProperties[] =
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties";
inline constexpr char kOldMemoryFormat[] =
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING";

// Megatron's: what its versions before 0.16 have instead of Metadata, and the
// plans of all ranks, which are not needed.
inline constexpr char kMegatronMetadata[] =
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata";
inline constexpr char kMegatronPlan[] =
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan";
inline constexpr char kPlan[] = "torch.distributed.checkpoint.planner.SavePlan";
inline constexpr char kWriteItem[] =
    "torch.distributed.checkpoint.planner.WriteItem";
inline constexpr char kWriteItemType[] =
    "torch.distributed.checkpoint.planner.WriteItemType";
inline constexpr char kTensorWriteData[] =
    "torch.distributed.checkpoint.planner.TensorWriteData";

}  // namespace fsdp::checkpoint::dcp_names

#endif  // CHECKPOINT_DCP_NAMES_H_
