// Every header of C++ behind the macros of windows.h: compiled, never run.
#include <Eigen/Eigenvalues>

#include "windows_macros.hpp"

#include "everything.hpp"

using namespace tessera;
template class tessera::cache<snapkv<bf16, 128>>;
