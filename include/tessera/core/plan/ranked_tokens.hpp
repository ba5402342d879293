// What a first stage ranked, for those who ask why a token stayed.
#pragma once

#include "../host/host_vector.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The tokens that competed in a layer of a sequence, by kv_head, and their scores as the selector got them. Tokens
/// that always stay (a scorer's window) have no score; a layer that stores no more than the budget has none at all.
struct ranked_tokens {
  host_vector<host_vector<index_t>> positions;
  host_vector<host_vector<float>> scores;
  host_vector<host_vector<index_t>>
      blocks;  ///< block sizes by which a selector of segments chose in each segment; 0: nothing
};

TESSERA_NAMESPACE_END
