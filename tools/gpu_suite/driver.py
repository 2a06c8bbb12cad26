"""Whether NVIDIA's driver shows a GPU to this process that the programs can use."""
import ctypes

LIBRARY = "libcuda.so.1"
CUDA = 13  # of the runtime that the programs are linked to


def why_no_gpu(library=LIBRARY):
    """What is amiss and what to do; None where there is a GPU."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return (f"there is no GPU: NVIDIA's driver is not there ({error}). Run this on a machine with a GPU; in a "
                "container, pass the GPU on (--gpus all)")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < 1000 * CUDA:
        return (f"NVIDIA's driver knows CUDA {version.value // 1000}.{version.value % 1000 // 10}, and the programs "
                f"were built for CUDA {CUDA}. Install driver 580 or a newer one")
    error = driver.cuInit(0)
    if error != 0:
        return (f"there is no GPU: NVIDIA's driver says error {error} (100: this process sees none). See nvidia-smi and "
                "CUDA_VISIBLE_DEVICES")
    count = ctypes.c_int()
    error = driver.cuDeviceGetCount(ctypes.byref(count))
    if error != 0 or count.value == 0:
        return f"there is no GPU: NVIDIA's driver shows none to this process (error {error}). See CUDA_VISIBLE_DEVICES"
    return None
