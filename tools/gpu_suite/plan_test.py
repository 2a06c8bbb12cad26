#!/usr/bin/env python3
"""Tests of what runs in which order, and that the plan, the targets and PyTorch's program know the same names."""
import pathlib
import re
import sys
import unittest

import plan
import targets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "benchmarks" / "peers"))
import peer_flags  # noqa: E402  pylint: disable=wrong-import-position

LISTING = """\
cc_binary rule //benchmarks:device_ops_benchmark
cc_binary rule //benchmarks:gpu_benchmarks
cc_test rule //comm/nccl:nccl_communicator_test
cc_test rule //device_ops/cuda:operators_test
cc_test rule //fsdp/tests/device:cuda_training_test
cc_test rule //third_party/cuda:smoke_test
cc_library rule //comm/nccl:nccl
"""


def programs(listing=LISTING):
    return plan.programs(plan.labels_of(listing))


class PlanTest(unittest.TestCase):

    def test_what_tells_most_comes_first(self):
        names = [entry["name"] for entry in programs()]
        self.assertEqual(names[:6], ["third_party/cuda:smoke_test", "device_ops/cuda:operators_test",
                                     "fsdp/tests/device:cuda_training_test", "train_step/bf16", "PyTorch, bf16",
                                     "FSDP2, bf16"])
        self.assertLess(names.index("comm/nccl:nccl_communicator_test"), names.index("sharded_step/bf16_over_fp32"))
        self.assertEqual(len(names), len(set(names)))

    def test_a_hanging_test_takes_a_small_part_of_ten_minutes(self):
        for entry in programs():
            self.assertLessEqual(entry["limit_s"], 90 if entry["kind"] in ("test", "sanitizer") else 240, entry["name"])

    def test_no_program_is_left_out(self):
        more = LISTING + "cc_test rule //a/b:new_test\ncc_binary rule //c:gpu_new\n"
        self.assertEqual({entry["file"] for entry in programs(more)} - {entry["file"] for entry in programs()},
                         {"a.b.new_test", "c.gpu_new"})
        kinds = {entry["file"]: entry["kind"] for entry in programs(more)}
        self.assertEqual((kinds["a.b.new_test"], kinds["c.gpu_new"]), ("test", "benchmark"))

    def test_programs_that_are_not_packed_are_not_run(self):
        files = {entry["file"] for entry in programs("cc_test rule //third_party/cuda:smoke_test")}
        self.assertEqual(files, {"third_party.cuda.smoke_test", plan.PEER_PROGRAM})

    def test_peers_flags_are_known_also_in_a_dry_run(self):
        peers = [entry for entry in programs() if entry["kind"] == "peer"]
        self.assertGreater(len(peers), 8)
        for entry in peers:
            self.assertEqual(peer_flags.parse(entry["flags"], "").device, "cuda", entry["name"])
            dry = peer_flags.parse(entry["flags"] + entry["dry_flags"], "")
            self.assertEqual((dry.device, dry.layers), ("cpu", 2), entry["name"])

    def test_every_case_of_a_target_is_planned(self):
        peers = {entry["name"] for entry in programs() if entry["kind"] == "peer"}
        filters = [flag.partition("=")[2] for entry in programs() if entry["kind"] == "benchmark"
                   for flag in entry["flags"] if flag.startswith("--benchmark_filter=")]
        cases = {where[0] for target in targets.TARGETS for where in (target.figure, target.over) if where}
        cases |= {case for _, contenders in targets.COMPARISONS for _, case, _ in contenders}
        for case in cases:
            self.assertTrue(case in peers or any(re.search(pattern, f"{case}/iterations:20") for pattern in filters), case)

    def test_no_case_runs_twice(self):
        filters = [flag.partition("=")[2] for entry in programs() if entry["file"] == plan.file_of(plan.BENCHMARKS)
                   for flag in entry["flags"]]
        for case in ("train_step/bf16", "train_step/bf16/checkpointing", "train_step/bf16/8_ranks", "fused_adamw/fp32",
                     "sharded_step/bf16_over_fp32", "offload/stepped_on_host/fp32", "all_gather/nccl/16_MiB"):
            found = [pattern for pattern in filters if re.search(pattern, f"{case}/iterations:20/manual_time")]
            self.assertEqual(len(found), 1, case)


if __name__ == "__main__":
    unittest.main()
