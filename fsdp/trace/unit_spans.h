// Spans of units, by the names that a buffer knows them by.
#ifndef FSDP_TRACE_UNIT_SPANS_H_
#define FSDP_TRACE_UNIT_SPANS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_category.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp {

// Appends to `*spans`; both arguments outlive this.
class UnitSpans {
 public:
  UnitSpans(const TraceBuffer& buffer, std::vector<TraceTimeline::Span>* spans)
      : buffer_(buffer), spans_(spans) {}

  // "`what` <name of the unit>". `unit`: TraceBuffer::Record::name.
  void Add(TraceCategory category, absl::string_view what, int unit,
           int64_t begin_ns, int64_t end_ns, int64_t bytes = 0) {
    const std::string& name = buffer_.name(unit);
    spans_->push_back({category, absl::StrCat(what, " ", name), name, begin_ns,
                       end_ns, bytes});
  }

 private:
  const TraceBuffer& buffer_;
  std::vector<TraceTimeline::Span>* const spans_;
};

}  // namespace fsdp

#endif  // FSDP_TRACE_UNIT_SPANS_H_
