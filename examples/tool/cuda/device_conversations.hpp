// Conversations whose cache lies on a GPU.
#pragma once

#include <memory>
#include <tessera/runtime/any/any_cache.hpp>

#include "tool/methods/method_cache.hpp"

namespace tool {

/// The cache of a conversation, or of several that decode together, over any method's cache on a GPU, which is empty. It is a cache of the
/// CUDA engine, too. Rows that come from the host are copied to the device, and outputs back.
/// given: element type of the rows that the model gives; tokens: most of a conversation. packs_by_turn: prompts lie whole one at a time.
std::unique_ptr<method_cache> device_conversations(std::unique_ptr<tessera::any_cache> cache, element_type given,
                                                   index_t conversations, index_t tokens, bool packs_by_turn);

}  // namespace tool
