# The methods: every header include/tessera/methods/NAME.hpp is a template tessera::NAME. The tool, its CUDA caches and
# the tests of all methods are made from this list, by name in alphabetical order; nobody writes it by hand.
file(GLOB tessera_methods CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include/tessera/methods"
     "${PROJECT_SOURCE_DIR}/include/tessera/methods/*.hpp")
list(TRANSFORM tessera_methods REPLACE "[.]hpp$" "")
list(SORT tessera_methods)
