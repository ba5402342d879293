// The parts of a cache on the device, by layer and sequence, and how room is made for their rows.
#pragma once

#include <algorithm>

#include "../../../../concepts/backend.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../runtime/layer_roles.hpp"
#include "../../../../runtime/turn/choosing_layer.hpp"
#include "../../../../runtime/turn/truncation.hpp"
#include "../../attend/attention.cuh"
#include "../../attend/prompt_attention.cuh"
#include "../../cache_options.hpp"
#include "../../choose/first_stage.cuh"
#include "../../read/reading.cuh"
#include "../../store/pack.cuh"
#include "../../store/sequence_archive.cuh"
#include "draft_rows.cuh"
#include "rereading.cuh"
#include "row_staging.cuh"
#include "step_order.cuh"
#include "text_marks.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The parts of one recipe's cache. Changes of rows and candidates are planned first. A plan does everything that may
/// throw, and none of its effects are visible. It is then committed, in stream order, or abandoned.
template <class Recipe, class Out>
struct cache_parts {
  using layout = typename Recipe::layout_type;
  using T = typename layout::element_type;
  using store_type = kv_store<layout>;
  using view_type = typename store_type::view_type;
  using reading_type = reading<Recipe, Out>;
  using read_view_type = typename reading_type::view_type;
  static_assert(!latent_encoding<typename layout::encoding_type>,
                "tessera: the CPU's cache stores latent rows; on the device attention reads an engine's (latent_view)");
  static_assert(layout::k_dim <= largest_head_dim && layout::v_dim <= largest_head_dim,
                "tessera: the CUDA cache takes head dims up to 256; the CPU cache 512 too");
  static_assert(backend_store<store_type, cudaStream_t>);
  static_assert(backend_observer<typename first_stage<Recipe>::observer_type, cudaStream_t>);
  static_assert(backend_attending<prompt_attending<Recipe, view_type, Out>, cudaStream_t>);
  static constexpr bool filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  static constexpr bool in_steps = fires_in_steps<typename Recipe::schedule_type>;
  /// Whether sequences of one step may have different numbers of tokens. What a step reads, scores or chooses by its
  /// queries is computed for all of its tokens together.
  static constexpr bool takes_uneven_steps = taken_back<Recipe>() != takes_back::nothing && !filters &&
                                             !Recipe::retrieve_type::retrieves &&
                                             !lies_beside_tokens(Recipe::retain_type::observed);
  /// Whether steps do more with their queries than read everything.
  static constexpr bool uses_queries = taken_back<Recipe>() == takes_back::nothing ||
                                       Recipe::retrieve_type::retrieves ||
                                       lies_beside_tokens(Recipe::retain_type::observed);
  using drafts_type = draft_rows<T, Out, view_type::k_dim, view_type::v_dim, uses_queries>;
  static constexpr bool fires_last = Recipe::schedule_type::fires_at(moment::step_end);

  cache_parts(const model_shape& model, const Recipe& recipe, const cache_options& sizes)
      : shape(model),
        options((sizes.check(), sizes)),
        device(device_info::current()),
        roles(shape, recipe.dense_layers, recipe.attention.rule),
        store(shape.layers, options.sequences, shape.kv_heads, options.tokens, options.rows,
              {Recipe::retain_type::drops || !shape.sliding.empty(), first_stage<Recipe>::observer_type::with_scores,
               Recipe::needs_segments, recipe.retrieve.mean_block(), Recipe::retain_type::drops},
              placement_of(recipe, shape), recipe.layout, &roles),
        next(std::size_t(options.sequences)),
        first_position(next.size()),
        next_position(next.size()),
        stepped(fires_last ? 2 * std::size_t(shape.layers) * std::size_t(options.sequences * shape.kv_heads) : 0),
        steps(options.sequences),
        marks(shape.layers, options.sequences, options.tokens, options.step_tokens),
        first(recipe, shape, options, device),
        read_stage(recipe, shape, options, device),
        step_attention(shape, first.members().q_heads(), options, device, recipe),
        prompts(recipe, shape, options, device),
        rereader(shape, options, device),
        order(shape.layers),
        staging(shape),
        drafts(shape, options),
        newest(shape.kv_heads, shape.sliding.empty() ? 0 : shape.window),
        attended(shape.layers) {
    attended.open(options.sequences - 1);
    store.adopt(fit_movers(first.max_kept_tokens()));
  }

  auto fit_movers(index_t max_kept_tokens) const {
    return store.fit(first.max_sequences(), (std::max)(max_kept_tokens, shape.window), device);
  }

  /// Errors   a sequence's budgets are larger than those that memory was made for.
  void require_covered(const planned<Recipe>& policies) const {
    first.require_covered(policies);
    read_stage.require_covered(policies);
  }
  /// The plan of a sequence, and its budgets, for the steps that follow.
  /// Errors   budgets of a sequence that exceed those of the recipe, for which memory was made.
  static void check_budgets(const Recipe& recipe, const Recipe& own) {
    require(own.budget() <= recipe.budget(), "budget of a sequence", own.budget(),
            "at most the recipe's, which is " + std::to_string(recipe.budget()), "raise the recipe's budget");
    if constexpr (Recipe::retain_type::chooses && Recipe::retrieve_type::retrieves && !Recipe::retain_type::plans) {
      require(own.retrieve.tokens <= recipe.retrieve.tokens, "read_tokens of a sequence", own.retrieve.tokens,
              "at most the recipe's, which are " + std::to_string(recipe.retrieve.tokens),
              "raise the recipe's read_tokens");
    }
  }
  void set_plan(index_t id, const planned<Recipe>& policies, cudaStream_t stream) {
    read_stage.set_plan(id, policies, stream);
    first.set_budgets({id}, [&](index_t) -> const planned<Recipe>& { return policies; }, 0, stream);
  }

  sequence_layers all_layers(const host_vector<index_t>& ids) const {
    sequence_layers owners;
    for (const index_t id : ids) {
      for (index_t layer = 0; layer < shape.layers; ++layer) owners.push_back({layer, id});
    }
    return owners;
  }
  /// How many slots the last step could read, by head. For layer shape.layers + l: how many entries the lists of layer
  /// l had.
  index_t* stepped_of(sequence_layer owner) const {
    return stepped.data() + (offset_t(owner.layer) * options.sequences + owner.id) * shape.kv_heads;
  }

  /// Calls plan(), which plans changes of `part`: the store or the candidates. Where it moves rows of other sequences,
  /// `stream` waits for a save of these. Errors: a step has begun, which would not find moved rows. Then the plan is
  /// abandoned.
  template <class Part, class Plan>
  void plan_beside_step(Part& part, const Plan& plan, cudaStream_t stream) const {
    plan();
    try {
      if (part.moves()) order.require_none_under_way(), hold_for_saves(stream);
    } catch (...) {
      part.abandon();
      throw;
    }
  }
  /// Drops tokens behind the window of sliding layers, once enough of them have gathered.
  void slide(const sequence_layers& owners, cudaStream_t stream) {
    for (const sequence_layer owner : owners) {
      const index_t window = roles.window(owner.layer);
      const token_bound held = store.bound(owner);
      if (window == 0 || held.longest <= longest_slid(window)) continue;
      const kept_bound kept{{window, (std::min)(held.total, offset_t(window) * shape.kv_heads)}, {}};
      plan_beside_step(store, [&] { store.plan_keep({owner}, {kept}, stream); }, stream);
      store.keep(owner, {newest.selection(store.lengths(owner), window, stream), kept}, stream);
    }
  }
  /// Makes room for `tokens` more in every head of these layers. Sliding layers drop tokens behind their window first.
  void make_room(const sequence_layers& owners, index_t tokens, cudaStream_t stream) {
    slide(owners, stream);
    plan_beside_step(store, [&] { store.plan_room(owners, tokens, false, stream); }, stream);
    store.commit_room(owners, stream);
    for (const sequence_layer owner : owners) order.disturbed(owner.id);
  }

  /// Forgets what an id's last sequence has left.
  void begin_sequence(index_t id, cudaStream_t stream) {
    first.observer().forget(id);
    prompts.open(id, stream);
    for (index_t layer = 0; layer < shape.layers; ++layer) attended[sequence_layer{layer, id}].clear();
  }
  /// Makes the index of a layer anew, if it has one.
  void refresh(sequence_layer owner, cudaStream_t stream) {
    if (roles.follows_recipe(owner.layer) && store.bound(owner).longest > 0) read_stage.refresh(owner, store, stream);
  }

  /// Lets `stream` wait for a save that is under way on another one.
  void hold_for_saves(cudaStream_t stream) const {
    if (saving) (*saving).hold(stream);
  }
  /// What saves and loads pass through; the first one makes it.
  transfer_buffer& save_buffer() {
    if (!saving) saving.make(shape.kv_heads);
    return *saving;
  }

  /// Positions that steps may read of a layer, by kv_head, or by query head where those of a group read apart.
  host_vector<host_vector<index_t>> downloaded_lists(sequence_layer owner) const {
    if (!roles.follows_recipe(owner.layer)) return store.downloaded_positions(owner);
    return read_stage.candidates().downloaded_lists(owner, store);
  }

  model_shape shape;
  cache_options options;
  device_info device;
  layer_roles roles;
  store_type store;
  device_buffer<index_t> next;  ///< by id: position of the next token
  /// By sequence of the batch: the position of the step's first token, and of the next step's.
  device_buffer<index_t> first_position, next_position;
  device_buffer<index_t> chunk_position{1};
  device_buffer<index_t> stepped;  ///< see `stepped_of`
  step_table steps;
  text_marks<Recipe::needs_segments> marks;
  first_stage<Recipe> first;
  reading_type read_stage;
  attention<view_type, read_view_type, Out> step_attention;
  prompt_attending<Recipe, view_type, Out> prompts;
  rereading<Recipe> rereader;
  step_order<Recipe> order;
  row_staging<T, Out> staging;
  drafts_type drafts;
  newest_slots newest;
  made_on_demand<transfer_buffer> saving;
  bool traces_attended = false;
  sequence_table<host_vector<host_vector<index_t>>> attended;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
