#include "tools/checkpoint/convert.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

absl::StatusOr<Source> OpenModel(FileSystem& files, const std::string& in,
                                 bool unchecked) {
  SourceOptions options;
  options.model_only = true;
  options.unchecked = unchecked;
  return OpenSource(files, in, options);
}

std::string Text(const Source& source, const std::string& out,
                 const WriteReport& report) {
  std::string text = absl::StrCat(
      Printable(out), ": ", Count(report.tensors, "tensor"), " in ",
      Count(report.files, "file"), ", ", SizeText(report.bytes), "\n");
  if (!source.others.empty()) {
    absl::StrAppend(&text, "left out, since they are no tensors: ",
                    Count(static_cast<int64_t>(source.others.size()), "value"),
                    "\n");
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> Convert(FileSystem& files, const std::string& in,
                                    const std::string& out,
                                    const ConvertOptions& options) {
  const auto write = options.to == "hf"      ? WriteHuggingFace
                     : options.to == "dcp"   ? WriteDcp
                     : options.to == "torch" ? WriteTorch
                                             : nullptr;
  if (write == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("--to=", options.to, ": hf, dcp and torch are possible"));
  }
  FSDP_ASSIGN_OR_RETURN(const Source source,
                        OpenModel(files, in, options.unchecked));
  FSDP_ASSIGN_OR_RETURN(const WriteReport report,
                        write(source, out, options.write));
  return Text(source, out, report);
}

absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConvertOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const Source source,
                        OpenModel(files, in, options.unchecked));
  if (!HasRankFiles(source)) {
    return absl::InvalidArgumentError(absl::StrCat(
        source.path, " is ", NameOf(source.format),
        ", without files of single ranks: use checkpoint convert --to=hf"));
  }
  FSDP_ASSIGN_OR_RETURN(const WriteReport report,
                        WriteHuggingFace(source, out, options.write));
  return Text(source, out, report);
}

}  // namespace fsdp::checkpoint::tool
