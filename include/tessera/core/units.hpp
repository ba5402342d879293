// What a selector chooses: the unit that a layout must be able to store or skip.
#pragma once

#include "config.hpp"

TESSERA_NAMESPACE_BEGIN

struct token_unit {};  ///< single KV entries
struct block_unit {};  ///< fixed runs of entries that are scored together

TESSERA_NAMESPACE_END
