# TESSERA_CUDA: AUTO takes a CUDA compiler that works, ON insists on one. Sets cuda_works for whoever builds CUDA code.
include_guard(GLOBAL)

set(cuda_works OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a)  # with Hopper's own instructions, which 90 leaves out
    endif()
    enable_language(CUDA)
    set(cuda_works ON)
    # nvcc's -O is that of host code; kernels are optimised fully without it. Our host code only launches them, and at -O3
    # g++ takes longer over it than nvcc over the kernels.
    string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
  elseif(NOT TESSERA_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "tessera: TESSERA_CUDA is ${TESSERA_CUDA}, but no CUDA compiler works; "
                        "set CUDACXX, or use AUTO")
  endif()
endif()

# How our own CUDA sources are compiled.
function(tessera_cuda_options target)
  # CMake 3.25 silently drops CUDA_STANDARD 20 for nvcc 13, so the flag goes in by hand.
  # 177: members that only satisfy a concept look unused to nvcc. -Wno-restrict: see settings.cmake.
  # -Wno-maybe-uninitialized: at -O1 g++ does not see what the callers of inlined code have set.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-diag-suppress=177;-Xcompiler=-Wall,-Wextra,-Wno-restrict,-Wno-maybe-uninitialized>")
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endfunction()
