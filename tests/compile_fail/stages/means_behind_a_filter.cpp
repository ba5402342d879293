// expect: tessera: block means are of everything that is stored, not of what a filter lets through; take retain
#include <tessera/budget/uniform.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<filter<observation_window, uniform, top_tokens>, mosaic_rows<dense<bf16, 128>>,
       retrieve<block_mean, whole_blocks>, gathered_decode, once>
    wrong;
