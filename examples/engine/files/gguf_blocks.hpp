// The encodings of GGUF's tensors that are read.
#pragma once

#include "gguf.hpp"

namespace engine {

/// The encoding of that id; null where it is not read.
const gguf_encoding* find_gguf_encoding(std::uint32_t id);

}  // namespace engine
