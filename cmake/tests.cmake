# tests/ mirrors include/. Every tests/**/test_*.cpp is found by its name; the files of one folder make one program
# (test_core, test_math, test_backend_cpu_attend, ...), which keeps linking cheap, and one ctest entry. Programs of .cu files:
# gpu_tests.cmake.

add_library(tessera_testing STATIC tests/catch_main.cpp)
target_include_directories(tessera_testing PUBLIC tests)
target_link_libraries(tessera_testing PUBLIC tessera::tessera Catch2::Catch2 Eigen3::Eigen)
target_compile_options(tessera_testing PRIVATE "$<$<CONFIG:Release>:-O0>")  # Catch2 itself: a few seconds saved, none lost

include(cmake/methods.cmake)
file(GLOB_RECURSE test_files CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/tests" tests/test_*.cpp)
set(test_programs "")
foreach(file IN LISTS test_files)
  cmake_path(GET file PARENT_PATH folder)
  if(folder MATCHES "^(consumer|compile_fail|fuzz|link)" OR (folder MATCHES "^examples" AND NOT TARGET tessera_engine))
    continue()
  endif()
  if(file MATCHES "test_allocated" AND CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    continue()  # it replaces operator new, and so do sanitizers
  endif()
  if(file MATCHES "test_allocation_faults" AND CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
    continue()  # it replaces operator new too, which the thread sanitizer alone does not let it
  endif()
  if(folder STREQUAL "")
    set(folder top)
  endif()
  string(REGEX REPLACE "^examples/(gate|rows|text|tool)" "examples" folder "${folder}")
  string(REPLACE "/" "_" program "test_${folder}")
  if(NOT TARGET ${program})
    add_executable(${program})
    target_link_libraries(${program} PRIVATE tessera_testing)
    list(APPEND test_programs ${program})
  endif()
  target_sources(${program} PRIVATE "${PROJECT_SOURCE_DIR}/tests/${file}")
endforeach()

# A unit alone knows where the sources lie: a compiler cache then serves the others in every clone.
set_property(SOURCE tests/methods/test_names.cpp APPEND PROPERTY COMPILE_DEFINITIONS
             TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")

# Whole caches, whose loops have tests of their own at -O3: -O2 saves a quarter of the compile time; -O1 saves half of it, but the
# tests then take three times as long.
foreach(program test_methods test_cache)
  if(TARGET ${program})
    target_compile_options(${program} PRIVATE "$<$<CONFIG:Release>:-O2>")
  endif()
endforeach()
# Little to run, and much to compile: bytes of every method in every layout, a cache that fails. Not optimised, it takes a third of the time.
foreach(program test_cache_allocated test_support_calls)
  if(TARGET ${program})
    target_compile_options(${program} PRIVATE "$<$<CONFIG:Release>:-O0>")
  endif()
endforeach()
# Tests of single headers run for seconds, and g++ takes up to six times as long over them at -O3 as at -O0. Six programs run for
# longer.
if(TESSERA_UNOPTIMISED_TESTS)
  foreach(program IN LISTS test_programs)
    if(program MATCHES "^test_(attention|cache|methods|runtime|backend_cpu_(choose|read|store))$")
      target_compile_options(${program} PRIVATE "$<$<CONFIG:Release>:-O1>")
    elseif(NOT program MATCHES "^test_examples.*$")
      target_compile_options(${program} PRIVATE "$<$<CONFIG:Release>:-O0>")
    endif()
  endforeach()
endif()

# What every method must do: one file a method, and the list of them.
if(TARGET test_methods)
  set(declarations "")
  set(calls "")
  set(includes "")
  set(visits "")
  set(files "")
  foreach(method IN LISTS tessera_methods)
    configure_file(tests/methods/support/method.cpp.in "test_methods/method_${method}.cpp" @ONLY)
    list(APPEND files "method_${method}.cpp")
    string(APPEND declarations "entry published_${method}();\n")
    list(APPEND calls "published_${method}()")
    string(APPEND includes "#include <tessera/methods/${method}.hpp>\n")
    string(APPEND visits "  visit.template operator()<tessera::${method}<T, D, D, Layout>>();\n")
  endforeach()
  list(JOIN calls ", " calls)
  configure_file(tests/methods/support/registry.cpp.in test_methods/registry.cpp @ONLY)
  tessera_join_units(units "${PROJECT_BINARY_DIR}/test_methods/methods" cpp 8 ${files})
  set(TESSERA_ROWS_OF_EVERY_METHOD "" CACHE STRING "Rows that every method is tested over; see tests/every_row_format.sh")
  if(TESSERA_ROWS_OF_EVERY_METHOD)
    set_source_files_properties(tests/methods/test_encoded_rows.cpp PROPERTIES
                                COMPILE_DEFINITIONS "TESSERA_ROWS_OF_EVERY_METHOD=${TESSERA_ROWS_OF_EVERY_METHOD}")
  endif()
  target_sources(test_methods PRIVATE ${units} "${PROJECT_BINARY_DIR}/test_methods/registry.cpp" tests/methods/support/entries.cpp
                 tests/methods/support/mixtures.cpp)
  configure_file(tests/methods/support/every_method.hpp.in test_methods/every_method.hpp @ONLY)
  target_include_directories(tessera_testing PUBLIC "${PROJECT_BINARY_DIR}/test_methods")

  # Parts of pages that the library itself says; further methods are on none of them.
  if(NOT TESSERA_MORE_METHODS)
    add_executable(library_facts docs/tools/library_facts.cpp)
    target_include_directories(library_facts PRIVATE "${PROJECT_BINARY_DIR}/test_methods")
    target_link_libraries(library_facts PRIVATE tessera::tessera Eigen3::Eigen)
    target_compile_options(library_facts PRIVATE "$<$<CONFIG:Release>:-O0>")
    add_test(NAME library_facts COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/docs/tools/library_facts.py" --check
                                        "$<TARGET_FILE:library_facts>" "${PROJECT_SOURCE_DIR}")
    set_tests_properties(library_facts PROPERTIES LABELS "cpu;check;docs" TIMEOUT ${tessera_hang})
  endif()
endif()

if(TARGET tessera)  # a sample of what tests/hostile/run.sh does
  add_test(NAME tool_hostile
           COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/tests/hostile/hostile.py" "$<TARGET_FILE:tessera>"
                   "${PROJECT_SOURCE_DIR}/examples" 200)
  set_tests_properties(tool_hostile PROPERTIES LABELS cpu TIMEOUT ${tessera_hang})
endif()

foreach(program IN LISTS test_programs)
  if(program MATCHES "^test_examples")
    target_compile_options(${program} PRIVATE "$<$<CONFIG:Release>:-O1>")  # what they measure lies in the tool and the engine
    target_compile_definitions(${program} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    target_include_directories(${program} PRIVATE "${PROJECT_SOURCE_DIR}/benchmarks")  # the serving benchmark's scheduler
    target_link_libraries(${program} PRIVATE tessera_engine)
    if(TARGET tessera)  # tests of the tool call its parts and run it
      target_link_libraries(${program} PRIVATE tessera_tool)
      add_dependencies(${program} tessera)
      target_compile_definitions(${program} PRIVATE TESSERA_TOOL="$<TARGET_FILE:tessera>")
    endif()
  endif()
  set(entries ${program})
  if(program STREQUAL test_methods)  # in two parts, which two cores share
    add_test(NAME test_methods COMMAND test_methods "~[allocations]")
    add_test(NAME test_methods_allocations COMMAND test_methods "[allocations]")
    list(APPEND entries test_methods_allocations)
  else()
    add_test(NAME ${program} COMMAND ${program})
  endif()
  set_tests_properties(${entries} PROPERTIES LABELS cpu TIMEOUT ${tessera_hang})
  if(program MATCHES "_cuda$")
    set_tests_properties(${program} PROPERTIES LABELS gpu
                         SKIP_REGULAR_EXPRESSION "skipped: no CUDA device on this machine")
  endif()
endforeach()
# The longest begin first, so that no core waits for them in the end.
if(TARGET test_methods)
  set_tests_properties(test_methods PROPERTIES COST 300)
  set_tests_properties(test_methods_allocations PROPERTIES COST 150)
endif()
if(TARGET test_cache)
  set_tests_properties(test_cache PROPERTIES COST 100)
endif()
