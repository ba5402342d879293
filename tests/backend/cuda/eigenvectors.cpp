// The solver of the CPU's caches of packed rows, which nvcc does not see: see tessera/runtime/eigen.hpp.
#include <tessera/runtime/eigen.hpp>

template void tessera::find_eigenvectors<double>(const double*, tessera::index_t, double*, double*);
