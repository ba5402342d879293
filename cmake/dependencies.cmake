# What our own programs need. The library itself needs nothing but a C++20 compiler.
# All of it comes from the system; a missing piece is named together with the Debian or Ubuntu package that brings it.

function(tessera_missing what package cure)
  message(FATAL_ERROR "tessera: ${what} is missing. Install it (Debian, Ubuntu: apt-get install ${package}), or "
                      "configure with ${cure}. tests/run.sh installs everything that is needed.")
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
  # SentencePiece ships no CMake package.
  find_path(SENTENCEPIECE_INCLUDE_DIR sentencepiece_processor.h)
  find_library(SENTENCEPIECE_LIBRARY sentencepiece)
  mark_as_advanced(SENTENCEPIECE_INCLUDE_DIR SENTENCEPIECE_LIBRARY)
  if(NOT SENTENCEPIECE_INCLUDE_DIR OR NOT SENTENCEPIECE_LIBRARY)
    tessera_missing("SentencePiece" "libsentencepiece-dev" "-DTESSERA_BUILD_EXAMPLES=OFF")
  endif()
  if(NOT TARGET sentencepiece::sentencepiece)
    add_library(sentencepiece::sentencepiece UNKNOWN IMPORTED)
    set_target_properties(sentencepiece::sentencepiece PROPERTIES
                          IMPORTED_LOCATION "${SENTENCEPIECE_LIBRARY}"
                          INTERFACE_INCLUDE_DIRECTORIES "${SENTENCEPIECE_INCLUDE_DIR}")
  endif()
  # Nor does Debian's PCRE2.
  find_path(PCRE2_INCLUDE_DIR pcre2.h)
  find_library(PCRE2_LIBRARY pcre2-8)
  mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_LIBRARY)
  if(NOT PCRE2_INCLUDE_DIR OR NOT PCRE2_LIBRARY)
    tessera_missing("PCRE2" "libpcre2-dev" "-DTESSERA_BUILD_EXAMPLES=OFF")
  endif()
  if(NOT TARGET pcre2::pcre2)
    add_library(pcre2::pcre2 UNKNOWN IMPORTED)
    set_target_properties(pcre2::pcre2 PROPERTIES IMPORTED_LOCATION "${PCRE2_LIBRARY}"
                          INTERFACE_INCLUDE_DIRECTORIES "${PCRE2_INCLUDE_DIR}")
  endif()
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
