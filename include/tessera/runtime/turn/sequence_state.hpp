// The state of one sequence of a cache: its turn, its clock and the progress of each layer.
#pragma once

#include <cstdint>

#include "../../core/host/host_vector.hpp"
#include "../../core/prompt/layer_progress.hpp"
#include "../../planned.hpp"

TESSERA_NAMESPACE_BEGIN

/// The state of one sequence of a cache whose recipe is `Recipe`.
template <class Recipe>
struct sequence_state {
  bool open = false;
  turn_clock now{};
  index_t first_prompt = 0;  ///< tokens; 0 until it has ended
  std::uint64_t step = 0;    ///< the number of the one that `begin_step` began; 0: none yet in this turn
  index_t step_began = -1;   ///< the position of its first token
  planned<Recipe> policies;
  host_vector<layer_progress> layers;
  index_t answer_began = 0;  ///< the position of the turn's first decoded token
  index_t announced = 0;     ///< tokens of the turn's prompt; 0: not announced
  index_t step_tokens = 0;   ///< of the step that `begin_step` began

  const layer_progress& front() const { return layers.front(); }
};

TESSERA_NAMESPACE_END
