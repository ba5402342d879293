# Installs the library to a folder inside the build folder, then builds and runs tests/consumer against it both ways.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(work "${BUILD_DIR}/consumer")
file(REMOVE_RECURSE "${work}")  # a header that was removed must not survive here
run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${work}/prefix")

foreach(way find_package add_subdirectory)
  if(way STREQUAL "find_package")
    set(where "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DWANTED_VERSION=${VERSION}")
  else()
    set(where "-DTESSERA_SUBDIRECTORY=${SOURCE_DIR}")
  endif()
  run("${CMAKE_COMMAND}" -S "${SOURCE_DIR}/tests/consumer" -B "${work}/${way}" -G "${GENERATOR}"
      "-DCMAKE_CXX_COMPILER=${CXX}" ${where})
  run("${CMAKE_COMMAND}" --build "${work}/${way}")
  run("${work}/${way}/consumer")
endforeach()
