// Reads the files that fsdp/trace/trace.h writes.
#ifndef TOOLS_TRACE_TRACE_FILE_H_
#define TOOLS_TRACE_TRACE_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/trace/trace_buffer.h"

namespace fsdp::trace_report {

struct Span {
  TraceCategory category;
  std::string name;
  std::string unit;  // empty: belongs to none
  double begin;      // seconds, by one clock for all ranks of a file
  double end;
  int64_t bytes = 0;
  int64_t step = 0;  // its number, for kStep
};

struct RankTrace {
  int rank = 0;
  int64_t num_dropped = 0;  // the oldest spans, which are missing
  std::vector<Span> spans;  // by begin, outer ones first
};

struct TraceText {
  std::string path;  // for messages
  std::string text;
};

// Returns the ranks of all files, ascending, with times since the first file's
// base. InvalidArgument names the file and the event: it is not a trace of
// ours, it is damaged, a rank appears twice, or there are no steps.
absl::StatusOr<std::vector<RankTrace>> ParseTraces(
    absl::Span<const TraceText> files);

// Reads the files and parses them. Errors of reading name the path.
absl::StatusOr<std::vector<RankTrace>> ReadTraces(
    absl::Span<const std::string> paths);

}  // namespace fsdp::trace_report

#endif  // TOOLS_TRACE_TRACE_FILE_H_
