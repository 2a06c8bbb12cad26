// Benchmarks measure time and compare it with these functions.
#ifndef BENCHMARKS_MEASURE_H_
#define BENCHMARKS_MEASURE_H_

#include <functional>
#include <string>
#include <vector>

namespace fsdp {

double Seconds(const std::function<void()>& fn);

// `values` has at least one; of an even number this is the upper middle one.
double Median(std::vector<double> values);

// Returns the median of over[i] / under[i].
double MedianRatio(const std::vector<double>& over,
                   const std::vector<double>& under);

// Runs `fn` for ranks 0 to `ranks` - 1, each in a thread that computes alone.
void OnAllRanks(int ranks, const std::function<void(int)>& fn);

// Returns what the environment variable names, by default /var/tmp.
std::string DirectoryIn(const char* variable);

}  // namespace fsdp

#endif  // BENCHMARKS_MEASURE_H_
