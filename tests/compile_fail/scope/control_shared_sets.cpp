// One set for a layer and for several compiles, by scorers of every kind.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/pyramid.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scope/per_layers.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/by_segment.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/selector/adaptive_blocks.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<by_segment<accumulated_attention>, pyramid, adaptive_blocks, per_layer<over_heads::maximum>>,
       dense<fp32, 64>, retrieve_all, dense_decode, each_step>
    one;
recipe<filter<key_norm, pyramid, top_tokens, per_layers<over_heads::sum>>, dense<fp32, 64>, retrieve_all, dense_decode,
       once>
    several;
