// A function that a header defines without `inline` would be defined here and in first.cpp: the linker objects.
#include "everything.hpp"

const void* address_in_second_unit();
const void* address_in_second_unit() { return &tessera::infinity; }
