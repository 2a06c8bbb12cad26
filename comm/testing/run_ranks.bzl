"""What tests that use run_ranks.h have in common."""

def cc_test_also_sharing_memory(name, **attributes):
    """Declares the cc_test X_test and, with ranks that share memory, X_sharing_memory_test."""
    native.cc_test(name = name, **attributes)
    native.cc_test(
        name = name[:-len("test")] + "sharing_memory_test",
        env = {"RUN_RANKS_SHARING_MEMORY": "1"},
        **attributes
    )
