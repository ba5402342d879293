// One of two units that include every public header; see second.cpp.
#include "everything.hpp"

const void* address_in_second_unit();

int main() {
  // An inline variable is one object in the whole program.
  return address_in_second_unit() == &tessera::infinity ? 0 : 1;
}
