// What a selector chooses: the unit that a layout must be able to store or skip.
#pragma once

#include "config.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

struct token_unit {};  ///< single KV entries
struct block_unit {};  ///< fixed runs of entries that are scored together
struct page_unit {};   ///< whole runs of entries that share a score: they are read, never stored, as one

/// The unit of a selector that leaves it to its run-time parameter.
enum class selection_unit { token, page };

TESSERA_SHARED_NAMESPACE_END
