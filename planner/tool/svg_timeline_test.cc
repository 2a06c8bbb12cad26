#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/scenario.h"
#include "planner/simulator/step_simulator.h"
#include "planner/tool/report.h"
#include "planner/tool/unit_file.h"

namespace fsdp::simulator {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::Not;
using ::testing::SizeIs;

// Whether every & of `text` begins one of the entities that XML knows.
bool EntitiesAreKnown(absl::string_view text) {
  for (size_t i = text.find('&'); i != absl::string_view::npos;
       i = text.find('&', i + 1)) {
    bool known = false;
    for (const char* entity : {"&amp;", "&lt;", "&gt;", "&quot;"}) {
      known |= absl::StartsWith(text.substr(i), entity);
    }
    if (!known) return false;
  }
  return true;
}

// The name of a tag and nothing else if its attributes are all `name="value"`.
std::string TagName(absl::string_view tag, std::string* error) {
  const size_t space = tag.find(' ');
  const std::string name(tag.substr(0, space));
  while (tag.find(' ') != absl::string_view::npos) {
    tag.remove_prefix(tag.find(' ') + 1);
    const size_t begin = tag.find("=\"");
    const size_t end = tag.find('"', begin + 2);
    if (begin == absl::string_view::npos || end == absl::string_view::npos ||
        tag.substr(0, begin).find(' ') != absl::string_view::npos) {
      *error = absl::StrCat("attribute at ", tag);
      return name;
    }
    tag.remove_prefix(end + 1);
    if (!tag.empty() && tag[0] != ' ') *error = absl::StrCat("after ", tag);
  }
  return name;
}

// What is wrong with `xml`: tags that do not match, attributes without quotes,
// unknown entities. Empty if nothing is.
std::string XmlError(absl::string_view xml) {
  std::vector<std::string> open;
  std::string error;
  bool had_root = false;
  while (!xml.empty() && error.empty()) {
    const size_t begin = xml.find('<');
    const absl::string_view text = xml.substr(0, begin);
    if (!EntitiesAreKnown(text)) return absl::StrCat("entity in ", text);
    if (absl::StrContains(text, ">")) return absl::StrCat("> in ", text);
    if (open.empty() && text.find_first_not_of(" \n") != text.npos) {
      return absl::StrCat("text outside: ", text);
    }
    if (begin == absl::string_view::npos) break;
    const size_t end = xml.find('>', begin);
    if (end == absl::string_view::npos) return "a tag without end";
    absl::string_view tag = xml.substr(begin + 1, end - begin - 1);
    xml.remove_prefix(end + 1);
    if (!EntitiesAreKnown(tag)) return absl::StrCat("entity in ", tag);
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) {
        return absl::StrCat("unexpected ", tag);
      }
      open.pop_back();
      continue;
    }
    if (open.empty() && had_root) return "a second root";
    had_root = true;
    const bool closed = tag.back() == '/';
    if (closed) tag.remove_suffix(1);
    const std::string name = TagName(tag, &error);
    if (!closed) open.push_back(name);
  }
  if (!error.empty() || open.empty()) return error;
  return absl::StrCat("open: ", open.back());
}

TEST(XmlErrorTest, FindsWhatIsWrong) {
  EXPECT_THAT(XmlError("<a b=\"c d\"><e/>x &amp; y</a>\n"), IsEmpty());
  for (const char* wrong :
       {"<a>", "<a></b>", "<a b=c/>", "<a b=\"c/>", "<a>&x;</a>", "<a>&</a>",
        "<a/><b/>", "x<a/>", "<a", "<a>></a>", "</a>", "<a b/>"}) {
    EXPECT_THAT(XmlError(wrong), Not(IsEmpty())) << wrong;
  }
}

Scenario SmallScenario() {
  GptShape gpt;
  gpt.layers = 4;
  gpt.dim = 64;
  Scenario scenario;
  scenario.model = *MakeGpt(gpt);
  scenario.sharding.ranks = 8;
  scenario.sharding.compute_bytes = 2;
  scenario.sharding.shard_ranks = 4;
  scenario.costs.flops_per_second = 1e12;
  scenario.costs.memory_bandwidth = 1e10;
  scenario.costs.levels = {{0, 1e-4, 1e9}};
  return scenario;
}

std::string Draw(const Scenario& scenario, absl::string_view title = "title") {
  absl::StatusOr<StepResult> step = Simulate(scenario);
  EXPECT_OK(step);
  return DrawTimeline(scenario.model, *step, title);
}

TEST(SvgTimelineTest, IsWellFormed) {
  const std::string svg = Draw(SmallScenario());
  EXPECT_EQ(XmlError(svg), "");
  for (const char* part :
       {"<svg xmlns=", "compute", "memory", "gathers", "reductions",
        "all-gather of blocks.3", "reduce-scatter of root",
        "all-reduce of blocks.0", "exposed wait", "url(#hatch", " ms</text>"}) {
    EXPECT_THAT(svg, HasSubstr(part));
  }
}

TEST(SvgTimelineTest, NamesMayHoldAnything) {
  Scenario scenario = SmallScenario();
  scenario.model.units[1].name = "a<b>&\"c\"\n\x01";
  const std::string svg = Draw(scenario, "<&>");
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_THAT(svg, HasSubstr("a&lt;b&gt;&amp;&quot;c&quot;"));
  EXPECT_THAT(svg, HasSubstr("&lt;&amp;&gt;"));
}

TEST(SvgTimelineTest, AStepWithoutTimeHasNoBars) {
  Scenario scenario = SmallScenario();
  scenario.costs.flops_per_second = scenario.costs.memory_bandwidth =
      std::numeric_limits<double>::infinity();
  scenario.costs.levels = {{0, 0, std::numeric_limits<double>::infinity()}};
  const std::string svg = Draw(scenario);
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_THAT(svg, Not(HasSubstr("<g>")));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(SvgTimelineTest, StaysSmallForManyUnits) {
  Scenario scenario = SmallScenario();
  GptShape gpt;
  gpt.layers = 20000;
  gpt.dim = 8;
  scenario.model = *MakeGpt(gpt);
  EXPECT_THAT(Draw(scenario), SizeIs(Lt(3u << 20)));
}

}  // namespace
}  // namespace fsdp::simulator
