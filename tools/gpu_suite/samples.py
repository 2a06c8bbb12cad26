"""Reports of programs, for tests."""
import json

GTEST = json.dumps({"testsuites": [{"name": "CudaTest", "testsuite": [
    {"name": "Runs", "status": "RUN", "result": "COMPLETED"},
    {"name": "Breaks", "status": "RUN", "result": "COMPLETED", "failures": [{"failure": "x.cc:3\nExpected: 1"}]},
    {"name": "Skips", "status": "RUN", "result": "SKIPPED"},
]}]})
BENCHMARK = json.dumps({"context": {}, "benchmarks": [
    {"name": "train_step/bf16/iterations:20/manual_time", "run_name": "x", "run_type": "iteration", "iterations": 20,
     "real_time": 100.5, "cpu_time": 3, "time_unit": "ms", "of_plain": 1.01, "reserved_of_plan": 0.9},
    {"name": "offload/stepped_on_host/fp32/iterations:20/manual_time", "run_name": "x", "error_occurred": True,
     "error_message": "RESOURCE_EXHAUSTED: out of memory", "iterations": 0, "real_time": 0, "cpu_time": 0,
     "time_unit": "ms"},
]})
