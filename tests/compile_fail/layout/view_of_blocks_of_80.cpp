// expect: tessera: a row of blocks has a head dim of whole blocks: of 32 elements 64, 96, 128, 192, 256 or 512
#include <tessera/core/views.hpp>

tessera::kv_view<tessera::block_int8_elements<tessera::fp16>, 80> view;
