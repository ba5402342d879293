// Every header of C++ behind the macros of windows.h: compiled, never run.
#include <Eigen/Eigenvalues>

#include "windows_macros.hpp"

#include "everything.hpp"

tessera::snapkv<tessera::bf16, 128> method;
