#include "tools/checkpoint/commands.h"

#include <vector>

namespace fsdp::checkpoint::tool {
namespace {

const FlagSpec kProgress = {"progress", "",
                            "say how far it is, also where nobody watches"};
const FlagSpec kUnchecked = {"unchecked", "",
                             "read damaged files, too: ignore checksums"};
const FlagSpec kMaxFileBytes = {
    "max_file_bytes", "N",
    "begin another file before this; default: 5000000000"};
const FlagSpec kPart = {"part", "PART",
                        "\"model\": without the optimizer; or \"all\""};

constexpr char kPaths[] =
    "  A path is the folder of a checkpoint, of a Hugging Face model, or of a\n"
    "  run, which means its latest checkpoint; or a file: safetensors, or an\n"
    "  index.";

}  // namespace

const std::vector<CommandSpec>& Commands() {
  static const auto* const commands = new std::vector<CommandSpec>{
      {"ls", {"FOLDER"}, "the checkpoints of a run, or what FOLDER is", "", {}},
      {"show",
       {"PATH", "[NAME]"},
       "files and totals; of tensor NAME: smallest, largest, mean, norm, NaN",
       kPaths,
       {{"tensors", "", "every tensor with its dtype, shape, size and file"},
        kPart,
        kUnchecked,
        kProgress}},
      {"verify",
       {"PATH"},
       "reads everything and compares it with the manifest's checksums",
       "  Of a run's folder, all its checkpoints. Of what others have "
       "written,\n"
       "  whether files have what headers and indices say. Ends with 1 where\n"
       "  there is a problem.",
       {kProgress}},
      {"diff",
       {"A", "B"},
       "names, shapes, dtypes and values that differ, whatever the formats",
       "  Everything where both have the same format, otherwise the model.\n"
       "  Ends with 1 where there is a difference.",
       {{"top", "N", "tensors in each list of the largest; default: 10"},
        kPart,
        kUnchecked,
        kProgress}},
      {"consolidate",
       {"FOLDER", "OUT"},
       "one Hugging Face model from the safetensors files of single ranks",
       "",
       {kMaxFileBytes, kUnchecked, kProgress}},
      {"prune",
       {"FOLDER"},
       "removes checkpoints of a run, once the newest one has proved sound",
       "",
       {{"keep_last", "N", "keep the newest ones; at least 1"},
        {"keep_every", "M", "and those whose steps are multiples of it"},
        {"dry_run", "", "only say which"},
        kProgress}},
  };
  return *commands;
}

}  // namespace fsdp::checkpoint::tool
