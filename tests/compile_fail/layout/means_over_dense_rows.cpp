// expect: tessera: block means lie beside packed rows; store packed_rows
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/block_mean.hpp>
#include <tessera/selector/whole_blocks.hpp>

using namespace tessera;
recipe<retain_all, dense<bf16, 128>, retrieve<block_mean, whole_blocks>, gathered_decode, once> wrong;
