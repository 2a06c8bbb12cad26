"""What tests that use run_ranks.h have in common."""

load("//tools/rules:cc.bzl", "cc_test")

def cc_test_also_sharing_memory(name, **attributes):
    """Declares the cc_test X_test and, with ranks that share memory, X_sharing_memory_test."""
    cc_test(name = name, **attributes)
    cc_test(
        name = name[:-len("test")] + "sharing_memory_test",
        env = {"RUN_RANKS_SHARING_MEMORY": "1"},
        **attributes
    )
