// The one source file that compiles Eigen's solver: see include/tessera/runtime/rotation.hpp.
#include <tessera/runtime/eigen.hpp>

template void tessera::find_eigenvectors<double>(const double*, tessera::index_t, double*, double*);
