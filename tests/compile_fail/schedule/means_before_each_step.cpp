// expect: tessera: block means are of what is stored when a step reads; take a schedule that drops at its end
#include <tessera/budget/uniform.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/schedule/before_each_step.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<position, uniform, top_tokens>, mosaic_rows<dense<bf16, 128>>, retrieve<block_mean, whole_blocks>,
       gathered_decode, before_each_step>
    wrong;
