// expect: tessera: rows hold float, fp16, bf16 or fp8; see as_elements
#include <tessera/core/views.hpp>

tessera::rows_view<const double> rows;
