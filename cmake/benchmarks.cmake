# Every benchmarks/**/bench_*.cpp is one program of its file's name.
file(GLOB_RECURSE bench_files CONFIGURE_DEPENDS benchmarks/bench_*.cpp)
foreach(file IN LISTS bench_files)
  cmake_path(GET file STEM name)
  add_executable(${name} "${file}")
  target_include_directories(${name} PRIVATE benchmarks)
  target_link_libraries(${name} PRIVATE tessera::tessera benchmark::benchmark benchmark::benchmark_main)
endforeach()
