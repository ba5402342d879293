# The GPU tests: built wherever CUDA compiles, run where there is a GPU (ctest -L gpu), else each program says that it is skipped.
# The files tests/**/test_*.cu of one folder make one program: test_gpu_attend, test_gpu_cache_packed and so on. Those of every method,
# which CMake makes, are test_gpu_methods. The target test_gpu builds all of them.
if(NOT cuda_works)
  return()
endif()
include(cmake/methods.cmake)
add_custom_target(test_gpu)

# What several programs call and g++ compiles: each of them links what it needs.
add_library(gpu_testing STATIC tests/backend/cuda/eigenvectors.cpp tests/backend/cuda/cache/cases/parameter_ends.cpp
            tests/backend/cuda/cache/cases/random_calls.cpp)
target_link_libraries(gpu_testing PUBLIC tessera_testing)

# The kernels of a smaller card, with its shared memory, on whatever card is here: a newer one runs code for an older one.
set(TESSERA_TEST_CAPABILITY "" CACHE STRING
    "Compute capability whose kernels and shared memory the GPU tests have: 80, 86 or 89; empty: the card's own")

function(tessera_gpu_program program)
  add_executable(${program} ${ARGN})
  target_link_libraries(${program} PRIVATE gpu_testing)
  tessera_cuda_options(${program})
  if(TESSERA_TEST_CAPABILITY)
    string(REGEX MATCH "[0-9]+" card "${CMAKE_CUDA_ARCHITECTURES}")
    set_target_properties(${program} PROPERTIES CUDA_ARCHITECTURES OFF)
    target_compile_options(${program} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${TESSERA_TEST_CAPABILITY},code=sm_${card}>")
    target_compile_definitions(${program} PRIVATE TESSERA_TEST_CAPABILITY=${TESSERA_TEST_CAPABILITY})
  endif()
  add_dependencies(test_gpu ${program})
  add_test(NAME ${program} COMMAND ${program})
  set_tests_properties(${program} PROPERTIES LABELS gpu TIMEOUT ${tessera_hang}
                       SKIP_REGULAR_EXPRESSION "skipped: no CUDA device on this machine")
endfunction()

# benchmarks/gpu.sh finds the program of a file by the same rule.
file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/tests/backend/cuda" tests/backend/cuda/test_*.cu)
set(folders "")
foreach(file IN LISTS files)
  cmake_path(GET file PARENT_PATH folder)
  if(folder STREQUAL "")
    set(folder operations)
  endif()
  string(REPLACE "/" "_" folder "${folder}")
  list(APPEND folders ${folder})
  list(APPEND files_of_${folder} "backend/cuda/${file}")
endforeach()
list(REMOVE_DUPLICATES folders)
set(methods_in_a_unit 8)
if(TESSERA_JOIN_TESTS)
  set(methods_in_a_unit 24)
endif()
foreach(folder IN LISTS folders)
  if(TESSERA_JOIN_TESTS)  # by paths below tests/, so that a compiler cache serves them in every clone
    tessera_join_units(units "${PROJECT_BINARY_DIR}/test_gpu/${folder}" cu 8 ${files_of_${folder}})
  else()
    list(TRANSFORM files_of_${folder} PREPEND "${PROJECT_SOURCE_DIR}/tests/" OUTPUT_VARIABLE units)
  endif()
  tessera_gpu_program(test_gpu_${folder} ${units})
endforeach()

set(TESSERA_GPU_TEST_METHODS "" CACHE STRING "Methods whose CUDA caches are tested; empty: all")
set(methods ${TESSERA_GPU_TEST_METHODS})
if(NOT methods)
  set(methods ${tessera_methods})
endif()
# Half of the methods store fp16, the others bf16: which ones does not matter. Those of one type share units.
set(fp16 "")
set(bf16 "")
foreach(method IN LISTS methods)
  string(LENGTH "${method}" letters)
  math(EXPR odd "${letters} % 2")
  set(element bf16)
  if(odd)
    set(element fp16)
  endif()
  configure_file(tests/backend/cuda/cache/method.cuh.in "test_gpu/test_cache_${method}.cuh" @ONLY)
  list(APPEND ${element} "test_cache_${method}.cuh")
endforeach()
set(units "")
foreach(element fp16 bf16)
  tessera_join_units(of_element "${PROJECT_BINARY_DIR}/test_gpu/caches_${element}" cu ${methods_in_a_unit} ${${element}})
  list(APPEND units ${of_element})
endforeach()
tessera_gpu_program(test_gpu_methods ${units})
