# How our own programs are compiled. These are directory options: whoever links tessera::tessera sees none of them.

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
  endif()
endif()
set(CMAKE_CXX_EXTENSIONS OFF)

# Seconds after which a test counts as hanging. It says nothing of how long a test takes, which depends on the machine.
set(tessera_hang 14400)

add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow>")
# g++ 12 warns of overlapping copies inside its own std::string (GCC bug 105651).
add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>")
if(TESSERA_WERROR)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
  # Warnings that g++ derives from inlined data flow come and go with the optimiser: they are shown, never fatal.
  add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=array-bounds;-Wno-error=maybe-uninitialized;\
-Wno-error=null-dereference;-Wno-error=stringop-overflow;-Wno-error=stringop-overread>")
endif()
if(TESSERA_NATIVE)
  # nvcc's host code too: what units pass each other is named for the instruction set (core/host/host_isa.hpp).
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-march=native>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-march=native>")
endif()

# ccache, where it is installed. Its key holds the text "-march=native" but not the CPU behind it, so a cache that moves
# to another machine could hand out illegal instructions: the CPU's feature list goes into the cache's namespace.
find_program(TESSERA_CCACHE ccache)
mark_as_advanced(TESSERA_CCACHE)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(cpu_features "")
  if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo cpu_features LIMIT_COUNT 1 REGEX "^(flags|Features)")
  endif()
  string(SHA1 cpu_key "${cpu_features}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_NAMESPACE=${cpu_key}" "${TESSERA_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CMAKE_CXX_COMPILER_LAUNCHER}")
endif()
