# What our own programs need. The library itself needs nothing but a C++20 compiler.
# All of it comes from the system; a missing piece is named together with the Debian or Ubuntu package that brings it.

function(tessera_missing what package cure)
  message(FATAL_ERROR "tessera: ${what} is missing. Install it (Debian, Ubuntu: apt-get install ${package}), or "
                      "configure with ${cure}. tests/run.sh installs everything that is needed.")
endfunction()

# A library that ships no CMake package, found by a header and its own file, becomes the imported target `target`.
function(tessera_system_library target what header library package)
  find_path(${what}_INCLUDE_DIR ${header})
  find_library(${what}_LIBRARY ${library})
  mark_as_advanced(${what}_INCLUDE_DIR ${what}_LIBRARY)
  if(NOT ${what}_INCLUDE_DIR OR NOT ${what}_LIBRARY)
    tessera_missing("${what}" "${package}" "-DTESSERA_BUILD_EXAMPLES=OFF")
  endif()
  if(NOT TARGET ${target})
    add_library(${target} UNKNOWN IMPORTED GLOBAL)
    set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${${what}_LIBRARY}"
                          INTERFACE_INCLUDE_DIRECTORIES "${${what}_INCLUDE_DIR}")
  endif()
endfunction()

if(TESSERA_BUILD_EXAMPLES)
  find_package(CLI11 QUIET)
  if(NOT CLI11_FOUND)
    tessera_missing("CLI11" "libcli11-dev" "-DTESSERA_BUILD_EXAMPLES=OFF")
  endif()
  find_package(nlohmann_json 3 QUIET)
  if(NOT nlohmann_json_FOUND)
    tessera_missing("nlohmann's JSON library" "nlohmann-json3-dev" "-DTESSERA_BUILD_EXAMPLES=OFF")
  endif()
  tessera_system_library(sentencepiece::sentencepiece SentencePiece sentencepiece_processor.h sentencepiece libsentencepiece-dev)
  tessera_system_library(pcre2::pcre2 PCRE2 pcre2.h pcre2-8 libpcre2-dev)
endif()

if(TESSERA_BUILD_EXAMPLES OR TESSERA_BUILD_TESTS)
  find_package(Eigen3 QUIET NO_MODULE)  # the engine's matrix products, and oracles in tests
  if(NOT Eigen3_FOUND)
    tessera_missing("Eigen 3" "libeigen3-dev" "-DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_BUILD_TESTS=OFF")
  endif()
endif()

if(TESSERA_BUILD_TESTS)
  find_package(Catch2 QUIET)  # 2 or 3; tests/catch.hpp hides the difference
  if(NOT Catch2_FOUND)
    tessera_missing("Catch2 (2 or 3)" "catch2" "-DTESSERA_BUILD_TESTS=OFF")
  endif()
  find_package(Python3 QUIET COMPONENTS Interpreter)  # standard library only, for the source checks
  if(NOT Python3_FOUND)
    tessera_missing("Python 3" "python3" "-DTESSERA_BUILD_TESTS=OFF")
  endif()
endif()

if(TESSERA_BUILD_BENCHMARKS)
  find_package(benchmark QUIET)
  if(NOT benchmark_FOUND)
    tessera_missing("Google Benchmark" "libbenchmark-dev" "-DTESSERA_BUILD_BENCHMARKS=OFF")
  endif()
endif()
