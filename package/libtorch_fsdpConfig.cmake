# Defines libtorch_fsdp::libtorch_fsdp, which brings along the headers and libraries of LibTorch.
include("${CMAKE_CURRENT_LIST_DIR}/libtorch_fsdpTorch.cmake")
set(_fsdp_version "${LIBTORCH_FSDP_TORCH}/include/torch/headeronly/version.h")
set(_fsdp_release "before 2.9")
if(EXISTS "${_fsdp_version}")
  file(STRINGS "${_fsdp_version}" _fsdp_release REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]*([0-9]+).*" "\\1.\\2" _fsdp_release "${_fsdp_release}")
endif()
set(_fsdp_remedy "name a LibTorch @TORCH@ (pip install torch==@TORCH@.*) in CMAKE_PREFIX_PATH")
if(NOT LIBTORCH_FSDP_TORCH)
  set(libtorch_fsdp_NOT_FOUND_MESSAGE "there is no TorchConfig.cmake in Torch_DIR and CMAKE_PREFIX_PATH: ${_fsdp_remedy}")
elseif(NOT _fsdp_release STREQUAL "@TORCH@")
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built for LibTorch @TORCH@, and "
    "${LIBTORCH_FSDP_TORCH} has ${_fsdp_release}, whose classes are laid out otherwise: ${_fsdp_remedy}, or build the "
    "library for that one:  LIBTORCH=${LIBTORCH_FSDP_TORCH} ./bazelw build --config=opt //package:install")
elseif("${TORCH_CXX_FLAGS} ${CMAKE_CXX_FLAGS}" MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built with _GLIBCXX_USE_CXX11_ABI=1, and "
    "${LIBTORCH_FSDP_TORCH} or CMAKE_CXX_FLAGS says 0: take a LibTorch of the new ABI (pip's is, since 2.7) and take the flag out")
elseif(@CUDA@ AND NOT EXISTS "${LIBTORCH_FSDP_TORCH}/lib/libtorch_cuda.so")
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built with --config=cuda, and "
    "${LIBTORCH_FSDP_TORCH} has no CUDA: name a LibTorch that has, or build the library without --config=cuda")
endif()
if(libtorch_fsdp_NOT_FOUND_MESSAGE)
  set(libtorch_fsdp_FOUND FALSE)
  return()
endif()

if(NOT TARGET libtorch_fsdp::libtorch_fsdp)
  get_filename_component(_fsdp_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  set(_fsdp_libraries torch_cpu c10)
  if(@CUDA@)
    list(APPEND _fsdp_libraries torch_cuda c10_cuda)
  endif()
  list(TRANSFORM _fsdp_libraries REPLACE ".+" "${LIBTORCH_FSDP_TORCH}/lib/lib\\0.so")
  # A program has to ask for them itself, even where it has nothing of theirs: its run path does not hold for what this
  # library needs. The files alone give it that path.
  string(REPLACE ";" "\",\"" _fsdp_needed "${_fsdp_libraries}")
  add_library(libtorch_fsdp::libtorch_fsdp SHARED IMPORTED)
  # NDEBUG, as some of LibTorch's classes are laid out otherwise without.
  set_target_properties(libtorch_fsdp::libtorch_fsdp PROPERTIES
    IMPORTED_LOCATION "${_fsdp_prefix}/lib/@LIBRARY@"
    IMPORTED_SONAME "@LIBRARY@"
    INTERFACE_COMPILE_DEFINITIONS NDEBUG
    INTERFACE_COMPILE_FEATURES cxx_std_@STANDARD@
    INTERFACE_INCLUDE_DIRECTORIES "${_fsdp_prefix}/include;${LIBTORCH_FSDP_TORCH}/include;${LIBTORCH_FSDP_TORCH}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${_fsdp_libraries};-Wl,--push-state,--no-as-needed,\"${_fsdp_needed}\",--pop-state")
endif()
