// expect: tessera: kv_view takes float, fp16, bf16 or an encoding such as fp8_elements<bf16>; see as_elements
#include <tessera/core/views.hpp>

tessera::kv_view<double, 128> view;
