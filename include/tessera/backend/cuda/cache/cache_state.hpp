// What the host knows of a CUDA cache's sequences: which are open, where they stand, what their budget comes to.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../../../core/error.hpp"
#include "../../../core/stage_plan.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

struct layer_state {
  index_t next_position = 0;
  index_t turn_tokens = 0;  // prompt tokens since the turn began; 0 while decoding
  std::vector<std::vector<index_t>> attended;
};

struct sequence_state {
  bool open = false;
  index_t prepared = 0;      // tokens of the step that prepare_step made room for
  index_t batched = 0;       // sequences that this step launches together with it
  index_t first_prompt = 0;  // tokens; 0 until it has ended
  stage_plan plan;           // of a conversation without a prompt, until the first has ended
  std::vector<layer_state> layers;

  const layer_state& front() const { return layers.front(); }

  /// Throws unless every layer has had the same prompt, and any at all.
  void check_prompt_ended() const {
    for (const layer_state& state : layers) {
      require(state.next_position == front().next_position, "tokens of a layer", state.next_position,
              "those of layer 0, which are " + std::to_string(front().next_position),
              "prefill every layer with every chunk before the prompt ends");
    }
    require(front().turn_tokens >= 1, "tokens of this turn", front().turn_tokens, "at least 1",
            "prefill a prompt before ending it");
  }
};

/// The sequences of a cache by id; ids of closed sequences are used again.
class sequence_table {
 public:
  sequence_table(index_t sequences, index_t layers) : layers_(layers), all_(std::size_t(sequences)) {}

  index_t open(const stage_plan& plan) {
    const auto free = std::find_if(all_.begin(), all_.end(), [](const auto& s) { return !s.open; });
    require(free != all_.end(), "open sequences", all_.size(), "fewer before another is opened",
            "close one, or raise cache_options::sequences");
    *free = {true, 0, 0, 0, plan, std::vector<layer_state>(std::size_t(layers_))};
    return index_t(free - all_.begin());
  }

  bool is_open(index_t id) const { return all_[std::size_t(id)].open; }
  const sequence_state& at(index_t id) const {
    require(id >= 0 && id < index_t(all_.size()) && all_[std::size_t(id)].open, "sequence", id,
            "an id that open() returned and close() has not taken back", "open a sequence first");
    return all_[std::size_t(id)];
  }
  const layer_state& at(index_t id, index_t layer) const {
    require(layer >= 0 && layer < layers_, "layer", layer, "0 to " + std::to_string(layers_ - 1),
            "pass a layer of the model");
    return at(id).layers[std::size_t(layer)];
  }
  sequence_state& at(index_t id) { return const_cast<sequence_state&>(std::as_const(*this).at(id)); }
  layer_state& at(index_t id, index_t layer) { return const_cast<layer_state&>(std::as_const(*this).at(id, layer)); }

 private:
  index_t layers_;
  std::vector<sequence_state> all_;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
