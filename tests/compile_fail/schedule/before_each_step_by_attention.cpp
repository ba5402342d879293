// expect: tessera: before a step reads, only positions can be scored; take a schedule that fires at its end
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/before_each_step.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;

template struct tessera::recipe<retain<accumulated_attention, uniform, top_tokens>, dense<bf16, 128>, retrieve_all,
                                dense_decode, before_each_step>;
