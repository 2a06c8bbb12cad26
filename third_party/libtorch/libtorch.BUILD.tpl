package(default_visibility = ["//visibility:public"])

# One directory instead of its ten thousand files: a glob would cost seconds of
# sandbox work in every compile action.
exports_files(["include"])

cc_library(
    name = "libtorch",
    srcs = [
        "lib/libc10.so",
        "lib/libtorch_cpu.so",
    ] + {optional_libraries},
    hdrs = ["include"],
    # The libraries are release builds, and some headers change the layout of
    # classes with NDEBUG; Gloo's process group is compiled in.
    defines = [
        "NDEBUG",
        "USE_C10D_GLOO",
    ],
    includes = [
        "include",
        "include/torch/csrc/api/include",
    ],
    linkopts = [
        "-ldl",
        "-lpthread",
    ],
)
