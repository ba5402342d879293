// A call of a cache as data, which can be made again, left out, made simpler and printed.
#pragma once

#include <utility>
#include <vector>

#include "called_cache.hpp"
#include "support/random.hpp"

namespace support {

/// What the calls must know of a method.
struct called_method {
  bool has_budget = false;
  bool has_two = false;        ///< a budget of its own for what stays: `set_budget` leaves what a step reads alone
  bool exact = false;          ///< steps read by exact scores
  bool accumulates = false;    ///< every query is scored when it comes
  bool filters = false;        ///< steps read a choice that is made when a prompt ends
  index_t read = 0;            ///< what a step of exact retrieval may read
  bool by_layer = false;       ///< a layer chooses when its prompt ends
  bool segments = false;       ///< prompts come with the boundaries of segments
  bool step_segments = false;  ///< and steps
  bool packs = false;          ///< a prompt's first chunk packs rows of earlier steps, which settles them: the device's
  bool searches = false;       ///< rows are replaced when a search is over, for which every step gives time
};

/// What a backend adds to the contract.
struct called_limits {
  bool on_device = false;   ///< queries on 16 bytes, steps as the device counts them, inputs that bf16 holds exactly
  index_t sequences = 0;    ///< that are open at a time; 0: any
  index_t step_tokens = 8;  ///< of one step
  index_t tokens = 0;       ///< that a head holds; 0: any
  bool is_tight = false;    ///< whether the pools may run out of room before that
};

/// Where the rows of all calls come from.
inline const std::vector<float>& call_inputs(bool in_bf16) {
  static const auto drawn = [] {
    rng own(50515);
    auto exact = normals(own, 1 << 16), rounded = exact;
    for (float& x : rounded) x = float(tessera::bf16(x));
    return std::pair{exact, rounded};
  }();
  return in_bf16 ? drawn.second : drawn.first;
}

/// Where results go: their shapes, in which `data` says whether they are wanted at all, and how many rows are written.
struct wanted_output {
  called_cache::results out, lse;
  index_t tokens = 0, sequences = 0;
};

enum class cache_verb {
  open,
  fork,
  truncate,
  detour,
  draft,
  close,
  reserve,
  prefill,
  prefill_attention,
  end_layer,
  end_prefill,
  announce,
  reread,
  prepare_step,
  begin_step,
  decode,
  set_budget,
  copy,
  look
};

/// How a sequence is forked: by `fork`, by bytes that the cache saves and its twin does not, by bytes that pass from one backend to the
/// other.
namespace fork_kind {
inline constexpr index_t plain = 0, by_bytes = 1, to_reference = 2, from_reference = 3;
}

/// What is taken back besides whole steps: a chunk, a draft, and a chunk, a step or one sequence of a step on its way.
namespace detour_kind {
inline constexpr index_t chunk = 0, draft = -1, part_of_chunk = -2, part_of_step = -3;
}

/// One call. Which members count depends on the verb.
struct cache_call {
  static constexpr int dim = 64;
  using boundary_fault = called_cache::boundary_fault;

  cache_verb verb = cache_verb::open;
  index_t layer = 0, id = 0, head = 0, tokens = 0;
  index_t first =
      0;         ///< of fork: its `fork_kind`; of truncate: the position; of detour: its steps, or one of `detour_kind`
  int step = 0;  ///< of prepare_step: its number, from 1; of what follows it: whose step; 0: nobody's
  bool is_altered = false;  ///< of begin_step and decode: the step's sequences are `ids`, its tokens `tokens`
  std::vector<index_t> ids{};
  std::vector<index_t> lengths{};             ///< of prepare_step: tokens of each sequence; empty: all have `tokens`
  std::vector<index_t> parents{};             ///< of a draft: its tree
  std::vector<std::vector<index_t>> nodes{};  ///< of draft, by sequence: what is accepted
  tessera::sequence_options options{};        ///< of open
  called_cache::rows q{}, k{}, v{};
  wanted_output wanted{};
  boundary_fault fault = boundary_fault::none;
  bool is_wrong = false;  ///< an argument is such that the call must be refused whatever came before
};

}  // namespace support
