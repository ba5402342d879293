// PyramidKV: SnapKV with a budget that falls from the first layer to the last.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/pyramid.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// SnapKV's scores; the first layer keeps most and the last about 1 / `beta` (20) of the average outside the window.
/// Paper    Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
///          arXiv:2406.02069.
/// Differs  one keep set per kv_head; window 32 as for snapkv (its scripts use 8).
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct pyramidkv
    : recipe<retain<observation_window, pyramid, top_tokens>, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "pyramidkv";
  static constexpr const char* paper = "PyramidKV, arXiv:2406.02069";
};

TESSERA_NAMESPACE_END
