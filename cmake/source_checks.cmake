# Checks that read the sources instead of running them, each one a ctest entry.

function(tessera_source_check name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS "cpu;check" TIMEOUT ${tessera_hang})
endfunction()

# The site of the contracts and the pages, as docs/build.sh builds it: a warning is an error.
add_test(NAME docs_site COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/docs/tools/docs_site.py" --out "${PROJECT_BINARY_DIR}/docs")
set_tests_properties(docs_site PROPERTIES LABELS "cpu;docs" TIMEOUT ${tessera_hang} SKIP_RETURN_CODE 77)

set(checks "${PROJECT_SOURCE_DIR}/cmake/checks")
tessera_source_check(layers Python3::Interpreter "${checks}/layers.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(mirrors Python3::Interpreter "${checks}/mirrors.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(policy_rows Python3::Interpreter "${checks}/policy_rows.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(sizes Python3::Interpreter "${checks}/sizes.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(words Python3::Interpreter "${checks}/words.py" "${PROJECT_SOURCE_DIR}")
# Of one version of clang-format, which tests/run.sh installs; without it the check says so.
tessera_source_check(format Python3::Interpreter "${checks}/format.py" "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}/format")
set_tests_properties(format PROPERTIES SKIP_RETURN_CODE 77)
tessera_source_check(docs Python3::Interpreter "${checks}/docs.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(figures_page Python3::Interpreter "${PROJECT_SOURCE_DIR}/benchmarks/plots/figures_page.py" --check "${PROJECT_SOURCE_DIR}")
tessera_source_check(public_headers Python3::Interpreter "${PROJECT_SOURCE_DIR}/docs/tools/public_headers.py" --check "${PROJECT_SOURCE_DIR}")
tessera_source_check(forbidden_text Python3::Interpreter "${checks}/forbidden_text.py" "${PROJECT_SOURCE_DIR}")
tessera_source_check(serving_simulation Python3::Interpreter "${PROJECT_SOURCE_DIR}/benchmarks/serving/test_simulate.py")
tessera_source_check(vllm_schedules Python3::Interpreter "${PROJECT_SOURCE_DIR}/examples/integrations/vllm/tests/test_plan.py")
tessera_source_check(checks_fail_when_they_should Python3::Interpreter "${checks}/self_test.py" "${CMAKE_CXX_COMPILER}")
tessera_source_check(two_targets Python3::Interpreter "${checks}/two_targets.py" "${PROJECT_SOURCE_DIR}"
                     "${CMAKE_CXX_COMPILER}" -std=c++20 "-I${PROJECT_SOURCE_DIR}/include")
set_tests_properties(two_targets PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: no (x86-64|objdump)")
if(TARGET tessera)  # the tool is part of what a new method has to reach
  set(with_cuda OFF)
  if(tessera_cuda_engine)
    set(with_cuda ON)
  endif()
  tessera_source_check(new_method Python3::Interpreter "${checks}/new_method.py" "${PROJECT_SOURCE_DIR}"
                       "${CMAKE_COMMAND}" "${CMAKE_GENERATOR}" "${CMAKE_CXX_COMPILER}" "${with_cuda}")
endif()

# tests/compile_fail/AXIS/*.cpp must not compile, and must say why; control_*.cpp there must compile.
file(GLOB compile_fail_files CONFIGURE_DEPENDS tests/compile_fail/*/*.cpp)
get_target_property(eigen_folder Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
foreach(file IN LISTS compile_fail_files)
  cmake_path(GET file STEM name)
  tessera_source_check(compile_fail_${name} Python3::Interpreter "${checks}/compile_fail.py" "${file}"
                       "${CMAKE_CXX_COMPILER}" -std=c++20 "-I${PROJECT_SOURCE_DIR}/include"
                       -isystem "${eigen_folder}")
endforeach()

# Somebody else's project finds the installed library, and takes it in as a subdirectory.
tessera_source_check(consumer "${CMAKE_COMMAND}" "-DSOURCE_DIR=${PROJECT_SOURCE_DIR}"
                     "-DBUILD_DIR=${PROJECT_BINARY_DIR}" "-DVERSION=${PROJECT_VERSION}"
                     "-DGENERATOR=${CMAKE_GENERATOR}" "-DCXX=${CMAKE_CXX_COMPILER}"
                     -P "${PROJECT_SOURCE_DIR}/cmake/checks/consumer.cmake")
