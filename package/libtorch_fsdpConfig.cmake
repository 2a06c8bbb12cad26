# Defines libtorch_fsdp::libtorch_fsdp. Needs the LibTorch that the library was built for: find_package(Torch).
include(CMakeFindDependencyMacro)
find_dependency(Torch)
string(CONCAT _fsdp_build "or build the library for that one:  "
  "LIBTORCH=${TORCH_INSTALL_PREFIX} ./bazelw build --config=opt //package:install")
if(NOT Torch_VERSION MATCHES "^@TORCH@[.]")
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built for LibTorch @TORCH@, and ${Torch_DIR} has "
    "${Torch_VERSION}, whose classes are laid out otherwise: name a LibTorch @TORCH@ (pip install torch==@TORCH@.*) in "
    "CMAKE_PREFIX_PATH, ${_fsdp_build}")
elseif("${TORCH_CXX_FLAGS} ${CMAKE_CXX_FLAGS}" MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built with _GLIBCXX_USE_CXX11_ABI=1, and "
    "${Torch_DIR} or CMAKE_CXX_FLAGS says 0: take a LibTorch of the new ABI (pip's is, since 2.7) and take the flag out")
elseif(@CUDA@ AND NOT TARGET torch_cuda)
  string(CONCAT libtorch_fsdp_NOT_FOUND_MESSAGE "this libtorch_fsdp is built with --config=cuda, and ${Torch_DIR} has no "
    "CUDA: name a LibTorch that has, or build the library without --config=cuda")
endif()
if(libtorch_fsdp_NOT_FOUND_MESSAGE)
  set(libtorch_fsdp_FOUND FALSE)
  return()
endif()

if(NOT TARGET libtorch_fsdp::libtorch_fsdp)
  get_filename_component(_fsdp_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(libtorch_fsdp::libtorch_fsdp SHARED IMPORTED)
  # NDEBUG, as some of LibTorch's classes are laid out otherwise without.
  set_target_properties(libtorch_fsdp::libtorch_fsdp PROPERTIES
    IMPORTED_LOCATION "${_fsdp_prefix}/lib/@LIBRARY@"
    IMPORTED_SONAME "@LIBRARY@"
    INTERFACE_COMPILE_DEFINITIONS NDEBUG
    INTERFACE_COMPILE_FEATURES cxx_std_@STANDARD@
    INTERFACE_INCLUDE_DIRECTORIES "${_fsdp_prefix}/include"
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}")
endif()
