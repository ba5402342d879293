// A method over another layout beside the same method over plain rows, through a conversation of several turns.
#pragma once

#include "conversation.hpp"
#include "entry_of.hpp"

namespace methods_test {

inline const tessera::model_shape layout_shape{2, 6, 3};

/// What all of them run with: small budgets, windows and pages, so that every stage has work to do.
inline settings small_settings(const std::string& method) {
  return {method, 40, {{"window", 8}, {"max_new", 30}, {"recent", 10}}, {}};
}

}  // namespace methods_test
