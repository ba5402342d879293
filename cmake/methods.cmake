# The methods: every header include/tessera/methods/NAME.hpp is a template tessera::NAME. The tool, its CUDA caches and
# the tests of all methods are made from this list, by name in alphabetical order; nobody writes it by hand.
file(GLOB tessera_methods CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include/tessera/methods"
     "${PROJECT_SOURCE_DIR}/include/tessera/methods/*.hpp")
# Methods of an experiment, as benchmarks/ablations: built like the library's, without being among them.
set(TESSERA_MORE_METHODS "" CACHE PATH "A folder with tessera/methods/NAME.hpp of further methods")
if(TESSERA_MORE_METHODS)
  file(GLOB more CONFIGURE_DEPENDS RELATIVE "${TESSERA_MORE_METHODS}/tessera/methods" "${TESSERA_MORE_METHODS}/tessera/methods/*.hpp")
  list(APPEND tessera_methods ${more})
  include_directories("${TESSERA_MORE_METHODS}")
endif()
list(TRANSFORM tessera_methods REPLACE "[.]hpp$" "")
list(SORT tessera_methods)
