// Every header of C++ as CUDA, twice in a row.
#include "everything.hpp"
