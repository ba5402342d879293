// What targets.cpp is called by. Rows and element types are the same in every build.
#pragma once

#include <tessera/core/views.hpp>

double run_for_any(const tessera::rows_view<const float>& rows, tessera::index_t threads);
double run_for_avx2(const tessera::rows_view<const float>& rows, tessera::index_t threads);
