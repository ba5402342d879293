// Columns of a prompt's lines that join what a filter lets through.
#pragma once

#include <cstdint>

#include "../../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Slots that join what a first stage chooses, as bits by query head: bit s of a row is slot s. [sequences, q_heads,
/// words] of one layer, by id.
struct joined_columns {
  const std::uint32_t* bits = nullptr;  ///< null: none
  index_t words = 0;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
