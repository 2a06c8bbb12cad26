// What happens when, in lanes over an axis of time, as an SVG file.
#ifndef TOOLS_DRAWING_LANE_CHART_H_
#define TOOLS_DRAWING_LANE_CHART_H_

#include <string>
#include <vector>

namespace fsdp::drawing {

struct LaneChart {
  // Of bars; in the legend if a bar has it.
  struct Style {
    std::string name;
    std::string fill;      // "#4e79a7"
    std::string text;      // colour of labels on it
    bool hatched = false;  // in stripes of that colour, without labels
  };
  struct Lane {
    std::string group;  // lanes of one group come one after the other
    std::string name;
  };
  struct Bar {
    int lane = 0;
    int style = 0;
    double begin = 0;  // seconds
    double end = 0;
    std::string label;  // "blocks.11", or only "11", where it fits
    std::string title;  // shown by a viewer over the bar
    // Bars at the same time share the height of the lane: the `part`th of
    // `parts`.
    int part = 0;
    int parts = 1;
  };
  std::string title;
  std::string subtitle;
  double begin = 0;  // of the axis, which counts from here
  double end = 0;
  std::vector<Style> styles;
  std::vector<Lane> lanes;
  std::vector<Bar> bars;  // in each lane by begin
};

std::string ToSvg(const LaneChart& chart);

}  // namespace fsdp::drawing

#endif  // TOOLS_DRAWING_LANE_CHART_H_
