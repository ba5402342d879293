// When a layer packs rows.
#pragma once

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// `chunk_end`: a chunk of a prompt has ended and another one follows.
enum class packing_moment { chunk_end, prompt_end, step_end };

TESSERA_NAMESPACE_END
