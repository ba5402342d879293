// TANGRAM: every head keeps a share of the prompt that was calibrated once, chunk by chunk as the prompt comes in.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/calibrated.hpp"
#include "../layout/dense_rows.hpp"
#include "../layout/ragged_pages.hpp"
#include "../layout/stored.hpp"
#include "../recipe.hpp"
#include "../schedule/each_chunk.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// SnapKV's scores. Each chunk of a prompt is compressed when it has been written: its last `window` (32) queries score
/// what is stored, what earlier chunks have kept stays but for the last chunk's window, and after n tokens of a turn's
/// prompt a head holds ceil(B n) of them. What was kept in earlier turns, and answers, stay. Heads that keep about as
/// much share pages.
/// Paper    TANGRAM, arXiv:2606.06302, Sec. 4.1 (shares) and 4.2 (pages).
/// Differs  scores go over all that is stored, not over the chunk alone; no sinks are forced; a head keeps the window
///          even where its share is smaller. Chunks matter: a prompt in one piece and in several keep different tokens.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = stored<dense_rows<T, D, Dv>, ragged_pages>>
struct tangram
    : recipe<retain<observation_window, calibrated, top_tokens>, Layout, retrieve_all, dense_decode, each_chunk> {
  static constexpr const char* name = "tangram";
  static constexpr const char* paper = "TANGRAM, arXiv:2606.06302";
};

TESSERA_NAMESPACE_END
