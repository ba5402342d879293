// A layout of 64 elements under a method of 128.
// expect: layout_of
#include <tessera/methods/snapkv.hpp>

using namespace tessera;

snapkv<bf16, 128, 128, dense<bf16, 64>> wrong;
