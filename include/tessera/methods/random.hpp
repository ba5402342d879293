// Random tokens: the floor that every method must beat.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/random_score.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps `budget` tokens that chance chooses, the same ones in every head and layer; neither sinks nor a window are
/// protected.
/// Paper    none. kvpress 0.5.5 has a press of this name.
/// Differs  chance goes by the token's position and a seed, so that chunks, threads, heads and backends agree.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct random : recipe<retain<random_score, uniform, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "random";
  static constexpr const char* paper = "none: a floor for comparisons";
};

TESSERA_NAMESPACE_END
