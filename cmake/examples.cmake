# The example engine (target tessera_engine), the command-line tool (target tessera) and the ladder of short programs.

foreach(part engine tool)
  if(EXISTS "${PROJECT_SOURCE_DIR}/examples/${part}/CMakeLists.txt")
    add_subdirectory(examples/${part})
  endif()
endforeach()

# Each rung is one file, one program and one test: it checks itself and exits with 0.
file(GLOB rungs CONFIGURE_DEPENDS examples/ladder/*.cpp)
foreach(rung IN LISTS rungs)
  cmake_path(GET rung STEM name)
  add_executable(ladder_${name} "${rung}")
  target_link_libraries(ladder_${name} PRIVATE tessera::tessera)
  if(TESSERA_BUILD_TESTS)
    add_test(NAME ladder_${name} COMMAND ladder_${name})
    set_tests_properties(ladder_${name} PROPERTIES LABELS "cpu;ladder" TIMEOUT 120)
  endif()
endforeach()
