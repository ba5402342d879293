// What budgets know of a layer without its scores: lengths. What they return for these: upper bounds.
#pragma once

#include "../host/host_vector.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A layer of one sequence by its lengths.
struct layer_extent {
  index_t layer = 0;
  index_t layers = 1;
  index_t kv_heads = 1;
  index_t protected_tail = 0;  ///< newest tokens of each head that are kept whatever their score
  index_t longest = 0;         ///< tokens of the longest head
};

/// One kv_head of a layer.
struct head_extent {
  index_t layer = 0;
  index_t layers = 1;
  index_t head = 0;
  index_t kv_heads = 1;
  index_t protected_tail = 0;
  index_t stored = 0;   ///< tokens of this head
  index_t earlier = 0;  ///< of them, those that were stored when the turn began
  index_t dropped = 0;  ///< tokens of this turn's prompt that it has dropped already
};

/// Upper bounds of the tokens of a layer of one sequence: of one kv_head, and of all together.
struct token_bound {
  index_t longest = 0;
  offset_t total = 0;
};

/// The same and, where they are known, the counts of every kv_head.
struct kept_bound : token_bound {
  host_vector<index_t> by_head;  ///< empty: not known
};

TESSERA_NAMESPACE_END
