# Every benchmarks/**/bench_*.cpp is one program of its file's name.
file(GLOB_RECURSE bench_files CONFIGURE_DEPENDS benchmarks/bench_*.cpp)
foreach(file IN LISTS bench_files)
  cmake_path(GET file STEM name)
  add_executable(${name} "${file}")
  target_include_directories(${name} PRIVATE benchmarks)
  target_link_libraries(${name} PRIVATE tessera::tessera benchmark::benchmark benchmark::benchmark_main)
endforeach()

# benchmarks/cuda/bench_cuda*.cu together are the program bench_cuda; benchmarks/gpu.sh runs it.
include(cmake/cuda.cmake)
if(cuda_works)
  file(GLOB cuda_bench_files CONFIGURE_DEPENDS benchmarks/cuda/bench_cuda*.cu)
  add_executable(bench_cuda ${cuda_bench_files})
  target_include_directories(bench_cuda PRIVATE benchmarks/cuda)
  target_link_libraries(bench_cuda PRIVATE tessera::tessera benchmark::benchmark)
  tessera_cuda_options(bench_cuda)
endif()
