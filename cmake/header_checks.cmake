# Every public header compiles alone, twice in a row: as C++ or, in backend/cuda, as CUDA. That nvcc takes the headers of C++
# too is seen in one unit of all of them: alone they have been seen already, and nvcc takes long over each.

include(cmake/cuda.cmake)
message(STATUS "tessera ${PROJECT_VERSION}: headers are checked as C++; as CUDA: ${cuda_works}")

file(GLOB_RECURSE all_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" include/tessera/*.hpp)
list(FILTER all_headers EXCLUDE REGEX "/detail/")  # parts: the public headers of their room include them

# One translation unit per header, in `result`.
function(tessera_header_units result folder extension)
  set(units "")
  foreach(header IN LISTS ARGN)
    string(REGEX REPLACE "[/.]" "_" unit "${header}")
    # file(CONFIGURE) leaves an unchanged file alone, so that nothing is rebuilt.
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${folder}/${unit}.${extension}" @ONLY CONTENT
"#include <@header@>
#include <@header@>
static_assert(__cplusplus >= 202002L, \"tessera: the C++20 flag did not reach the compiler\");
")
    list(APPEND units "${PROJECT_BINARY_DIR}/${folder}/${unit}.${extension}")
  endforeach()
  set(${result} "${units}" PARENT_SCOPE)
endfunction()

tessera_header_units(units headers_alone cpp ${all_headers})
add_library(headers_alone OBJECT ${units})
target_link_libraries(headers_alone PRIVATE tessera::tessera Eigen3::Eigen)

if(cuda_works)
  file(GLOB_RECURSE cuda_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" include/tessera/*.cuh)
  list(FILTER cuda_headers EXCLUDE REGEX "/detail/")
  tessera_header_units(units headers_alone_cuda cu ${cuda_headers})
  add_library(headers_alone_cuda OBJECT ${units})
  target_link_libraries(headers_alone_cuda PRIVATE tessera::tessera Eigen3::Eigen)
  tessera_cuda_options(headers_alone_cuda)
  # PTX: nvcc reads all of a header, but not twice, and g++ not at all: a quarter of the time.
  set_target_properties(headers_alone_cuda PROPERTIES CUDA_PTX_COMPILATION ON CUDA_ARCHITECTURES 90a-virtual)

  add_library(everything_as_cuda OBJECT tests/link/everything.cu)
  target_link_libraries(everything_as_cuda PRIVATE tessera::tessera Eigen3::Eigen)
  target_include_directories(everything_as_cuda PRIVATE "${PROJECT_BINARY_DIR}/two_units")
  tessera_cuda_options(everything_as_cuda)

  # One cache for every architecture that the headers promise, with the flag that PyTorch's extensions are built with: compiled,
  # never run.
  add_library(architectures OBJECT tests/link/architectures.cu)
  target_link_libraries(architectures PRIVATE tessera::tessera)
  tessera_cuda_options(architectures)
  target_compile_options(architectures PRIVATE --expt-relaxed-constexpr)
  set_target_properties(architectures PROPERTIES CUDA_ARCHITECTURES "80-real;89-real;90a-real;100-real;120-real")
endif()

# Two units that both include everything, linked into one program and run.
set(include_everything ${all_headers})
list(TRANSFORM include_everything PREPEND "#include <")
list(TRANSFORM include_everything APPEND ">\n")
list(JOIN include_everything "" include_everything)
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/two_units/everything.hpp" CONTENT "${include_everything}" @ONLY)
add_library(windows_macros OBJECT tests/link/windows_macros.cpp)
target_include_directories(windows_macros PRIVATE "${PROJECT_BINARY_DIR}/two_units")
target_link_libraries(windows_macros PRIVATE tessera::tessera Eigen3::Eigen)
add_executable(two_units tests/link/first.cpp tests/link/second.cpp)
target_include_directories(two_units PRIVATE "${PROJECT_BINARY_DIR}/two_units")
target_link_libraries(two_units PRIVATE tessera::tessera Eigen3::Eigen)
add_test(NAME two_units COMMAND two_units)
set_tests_properties(two_units PROPERTIES LABELS "cpu;check" TIMEOUT ${tessera_hang})
