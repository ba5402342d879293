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

# Sources that include ARGN, `count` files each, as PREFIX_0.EXTENSION and so on: a unit compiles once what its files share.
# `result` lists them.
function(tessera_join_units result prefix extension count)
  set(units "")
  while(ARGN)
    list(SUBLIST ARGN 0 ${count} files)
    list(REMOVE_ITEM ARGN ${files})
    list(LENGTH units number)
    list(TRANSFORM files PREPEND "#include \"")
    list(TRANSFORM files APPEND "\"\n")
    list(JOIN files "" files)
    # file(CONFIGURE) leaves an unchanged file alone, so that nothing is rebuilt.
    file(CONFIGURE OUTPUT "${prefix}_${number}.${extension}" CONTENT "${files}" @ONLY)
    list(APPEND units "${prefix}_${number}.${extension}")
  endwhile()
  set(${result} "${units}" PARENT_SCOPE)
endfunction()
