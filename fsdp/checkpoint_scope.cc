#include "fsdp/checkpoint_scope.h"

#include <memory>
#include <utility>

namespace fsdp {
namespace {

thread_local RunningUnits units_under_way;
thread_local RegionScope* current_region = nullptr;

}  // namespace

const RunningUnits& UnitsUnderWay() { return units_under_way; }

UnitScope::UnitScope(std::shared_ptr<const RunningUnit> unit) {
  units_under_way.push_back(std::move(unit));
}

UnitScope::~UnitScope() { units_under_way.pop_back(); }

RegionScope::RegionScope(bool requires_grad, bool arguments_require_grad)
    : requires_grad_(requires_grad),
      passes_grad_(arguments_require_grad),
      outer_(current_region) {
  current_region = this;
}

RegionScope::~RegionScope() { current_region = outer_; }

RegionScope* RegionScope::Current() { return current_region; }

RecomputeScope::RecomputeScope(RunningUnits units) : units_(std::move(units)) {
  units_.swap(units_under_way);
  std::swap(region_, current_region);
}

RecomputeScope::~RecomputeScope() {
  units_.swap(units_under_way);
  std::swap(region_, current_region);
}

}  // namespace fsdp
