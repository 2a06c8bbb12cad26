# Sets LIBTORCH_FSDP_TORCH: the folder of LibTorch, with include and lib; empty if there is none. Torch_DIR, CMAKE_PREFIX_PATH
# and the folder in which pip has put both are searched for its CMake file, which is not run: that of a LibTorch for CUDA ends
# CMake where the CUDA toolkit is not installed, which this library does not need.
string(REPLACE ":" ";" _fsdp_prefixes "$ENV{CMAKE_PREFIX_PATH}")
find_file(_fsdp_torch TorchConfig.cmake
  HINTS ${Torch_DIR} $ENV{Torch_DIR} ${CMAKE_PREFIX_PATH} ${_fsdp_prefixes} "${CMAKE_CURRENT_LIST_DIR}/../../../.."
  PATHS /usr /usr/local
  PATH_SUFFIXES Torch share/cmake/Torch torch/share/cmake/Torch libtorch/share/cmake/Torch
  NO_DEFAULT_PATH)
set(LIBTORCH_FSDP_TORCH "")
if(_fsdp_torch)
  get_filename_component(LIBTORCH_FSDP_TORCH "${_fsdp_torch}/../../../.." REALPATH)
endif()
unset(_fsdp_torch CACHE)
