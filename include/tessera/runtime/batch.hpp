// One decode step of a cache.
#pragma once

#include <cstdint>

#include "../core/host_vector.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// What one decode step of a cache does, made by `prepare_step` and handed to every layer. An engine that records steps
/// keys its graphs by the number of sequences, `tokens` and the actions.
struct batch {
  host_vector<index_t> ids;
  index_t tokens = 0;
  bool evicts_first = false;               ///< the first stage chooses before the step reads
  bool evicts_last = false;                ///< the first stage chooses when the step has been attended
  host_vector<std::uint8_t> boundaries{};  ///< [sequences, tokens], of a recipe that needs them in steps

  index_t sequences() const { return index_t(ids.size()); }
};

inline constexpr index_t most_step_tokens = 8;

TESSERA_NAMESPACE_END
