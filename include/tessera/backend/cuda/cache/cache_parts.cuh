// What the objects of a cache on the device do together: rooms that a call makes, choices, what steps read.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "cache_answers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The verbs of which `cache` makes its calls.
template <class Recipe, class Out>
class cache_parts : public cache_answers<Recipe, Out> {
  using objects = cache_answers<Recipe, Out>;

 public:
  using typename objects::T;

 protected:
  using objects::attended_, objects::attention_, objects::conversations_, objects::filters, objects::first_,
      objects::first_position_, objects::newest_, objects::next_, objects::after_, objects::device_, objects::options_,
      objects::order_, objects::policies, objects::prompts_, objects::reading_, objects::recipe_, objects::roles_,
      objects::shape_, objects::stepped_of, objects::steps_, objects::store_, objects::downloaded_lists;
  using objects::objects;
  using typename objects::read_view_type, typename objects::view_type;

  sequence_layers all_layers(const host_vector<index_t>& ids) const {
    sequence_layers owners;
    for (const index_t id : ids) {
      for (index_t layer = 0; layer < shape_.layers; ++layer) owners.push_back({layer, id});
    }
    return owners;
  }
  /// Calls plan(), which plans changes of `planned`: the store, or the lists. Errors: a step has begun, and the plan
  /// moves rows of other sequences, which the step would not find; the plan is forgotten.
  template <class Planned, class Plan>
  void plan_beside_step(Planned& planned, const Plan& plan) const {
    plan();
    try {
      if (planned.moves()) order_.require_none_under_way();
    } catch (...) {
      planned.abandon();
      throw;
    }
  }
  /// Sliding layers drop what they have left behind, now and then.
  void slide(const sequence_layers& owners, cudaStream_t stream) {
    for (const sequence_layer owner : owners) {
      const index_t window = roles_.window(owner.layer);
      const token_bound held = store_.bound(owner);
      if (window == 0 || held.longest <= longest_slid(window)) continue;
      const kept_bound kept{{window, (std::min)(held.total, offset_t(window) * shape_.kv_heads)}, {}};
      plan_beside_step(store_, [&] { store_.plan_keep({owner}, {kept}, stream); });
      store_.keep(owner, {newest_.of(store_.lengths(owner), window, stream), kept}, stream);
    }
  }

  /// Sliding layers drop what they have left behind first, now and then.
  void make_store_room(const sequence_layers& owners, index_t tokens, cudaStream_t stream) {
    slide(owners, stream);
    plan_beside_step(store_, [&] { store_.plan_room(owners, tokens, stream); });
    store_.commit_room(owners, stream);
    for (const sequence_layer owner : owners) order_.disturbed(owner.id);
  }

  /// Takes another budget, when all that may fail has been made.
  void follow_budget(const Recipe& changed, cudaStream_t stream) {
    order_.require_all_finished();
    auto first = first_stage<Recipe>(changed, shape_, options_, device_);
    auto reader = reading_.reader().fit(changed, shape_, options_, device_);
    auto movers = objects::fit_movers(first);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    recipe_ = changed;
    first_.adopt(std::move(first));
    reading_.reader().adopt(std::move(reader));
    store_.adopt(std::move(movers));
    order_.disturbed();
    conversations_.follow_budget(recipe_);
    for (index_t id = 0; id < conversations_.size(); ++id) {
      if (conversations_.is_open(id)) reading_.set_plan(id, conversations_.at(id).policies, stream);
    }
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  /// What a sequence without tokens has, and has reported.
  void begin_place(index_t id, cudaStream_t stream) {
    first_.forget(id);
    prompts_.open(id, stream);
    for (index_t layer = 0; layer < shape_.layers; ++layer) attended_[sequence_layer{layer, id}].clear();
  }
  /// Gives back all that a sequence holds.
  void empty_place(index_t id, cudaStream_t stream) {
    store_.clear(id, stream);
    reading_.lists().clear(id, stream);
    reading_.reader().clear(id, stream);
    first_.forget(id);
  }

  void plan_copy(index_t from, index_t to, cudaStream_t stream) {
    store_.plan_copy(from, to, stream);
    try {
      reading_.lists().plan_copy(from, to);
    } catch (...) {
      store_.abandon();
      throw;
    }
  }
  /// A new id with all that another one holds between two turns, or steps. Where it throws, the id is closed.
  index_t copy_of(index_t id, cudaStream_t stream) {
    const index_t to = conversations_.fork(id);
    try {
      plan_copy(id, to, stream);
      store_.commit_copy(id, to, stream);
      reading_.lists().commit_copy(id, to, stream);
      copy_on_device(next_.data() + to, next_.data() + id, 1, stream);
      begin_place(to, stream);
      first_.copy(id, to, stream);
      prompts_.copy(id, to, stream);
      reading_.set_plan(to, policies(to), stream);
      for (index_t layer = 0; layer < shape_.layers; ++layer) {
        if (roles_.follows_recipe(layer) && store_.bound({layer, to}).longest > 0)
          reading_.refresh({layer, to}, store_, stream);
      }
      reading_.reader().copy(id, to, stream);
    } catch (...) {
      conversations_.close(to);
      empty_place(to, stream);
      throw;
    }
    return to;
  }

  /// Plans what the layers of a conversation whose prompt ends keep, or let through; returns those that have anything
  /// to do.
  host_vector<index_t> plan_choice(index_t id, bool due, const planned<Recipe>& fitted, cudaStream_t stream) {
    if (due) first_.count_over_model(id, store_, fitted, roles_, stream);
    host_vector<index_t> layers;
    sequence_layers owners;
    host_vector<kept_bound> kept;
    for (index_t layer = 0; (due || filters) && layer < shape_.layers; ++layer) {
      if (!roles_.follows_recipe(layer)) continue;
      const token_bound held = store_.bound({layer, id});
      const index_t chooser = first_.chooser(layer, fitted, roles_);
      if (!filters && first_.keeps_everything({chooser, id}, held, fitted)) continue;
      layers.push_back(layer), owners.push_back({layer, id});
      // How many columns join, only the device knows.
      kept.push_back(due && !prompts_.columns(layer).bits
                         ? first_.bound({chooser, id}, store_, fitted, conversations_.reach({layer, id}).seen())
                         : kept_bound{held, {}});
    }
    if (filters)
      plan_beside_step(reading_.lists(), [&] { reading_.lists().plan_pass(owners, kept); });
    else
      plan_beside_step(store_, [&] { store_.plan_keep(owners, kept, stream); });
    return layers;
  }
  /// Plans what is packed of a conversation whose prompt ends.
  void plan_packing(index_t id, cudaStream_t stream) {
    const index_t prompt = conversations_.at(id).front().turn_tokens;
    plan_beside_step(store_, [&] { store_.plan_packing(all_layers({id}), prompt, stream); });
  }
  /// Before `tokens` more of a prompt are written to a layer: where a chunk ends the layer keeps its share of what it
  /// has, and pages that layers share are set aside for all of them, or for none.
  void begin_chunk(sequence_layer owner, index_t tokens, cudaStream_t stream) {
    if (conversations_.at(owner).turn_tokens == 0) first_.begin_turn(owner, store_);
    if (conversations_.chunk_is_due(recipe_, owner, tokens)) {
      end_chunk(owner, stream);
      conversations_.judged_chunk(owner);
      first_.end_chunk(owner, store_, conversations_.at(owner).again);
    }
    if (owner.layer > 0 || conversations_.at(owner.id).announced > 0) return;
    store_.require_fits(owner, tokens);
    store_.expect(owner.id, tokens);
  }
  void end_chunk(sequence_layer owner, cudaStream_t stream) {
    if constexpr (Recipe::schedule_type::fires_at(moment::chunk_end)) {
      const planned<Recipe>& fitted = policies(owner.id);
      if (!roles_.follows_recipe(owner.layer) || first_.keeps_everything(owner, store_.bound(owner), fitted)) return;
      const prompt_reach reach = conversations_.reach(owner);
      const kept_bound kept = first_.bound(owner, store_, fitted, reach.seen());
      plan_beside_step(store_, [&] { store_.plan_keep({owner}, {kept}, stream); });
      const index_t* next = set_number(next_.data() + owner.id, reach.end, stream);
      store_.keep(owner, first_.choose(owner, store_, fitted, roles_.rule(owner.layer), reach, next, stream), stream);
    }
  }
  /// A layer keeps, or lets through, what is chosen when a prompt ends; `kept`: by the layer before, for one that takes
  /// it over. Where the schedule is not `due`, a filter lets everything through.
  void choose(sequence_layer owner, bool due, const planned<Recipe>& fitted, kept_slots& kept, cudaStream_t stream) {
    for (index_t m = 0; m < first_.members().count(); ++m) {
      if (!due) {
        kept = {{nullptr, store_.lengths(owner)}, {store_.bound(owner), {}}};
      } else if (first_.chooser(owner.layer, fitted, roles_) == owner.layer) {
        kept = first_.choose(owner, store_, fitted, roles_.rule(owner.layer), conversations_.reach(owner),
                             next_.data() + owner.id, stream, m);
      }
      if (!filters) return store_.keep(owner, kept, stream);
      const joined_columns columns =
          due ? prompts_.columns(first_.chooser(owner.layer, fitted, roles_)) : joined_columns{};
      if (columns.bits) kept.bound = {store_.bound(owner), {}};
      reading_.lists().pass(owner, m, kept, columns, stream);
    }
  }
  /// Drops, within a step, what the first stage does not choose, or lets through what it does; the newest `own` tokens
  /// stay.
  void choose_in_step(index_t layer, const batch& step, const view_type& all, index_t own, cudaStream_t stream) {
    if constexpr (fires_in_steps<typename Recipe::schedule_type>) {
      reading_.lists().note_read(layer, steps_, step.sequences(), stepped_of({layer, 0}),
                                 stepped_of({shape_.layers + layer, 0}), stream);
      for (index_t m = 0; m < first_.members().count(); ++m) {
        const selection_view kept = first_.choose_in_step(layer, steps_.ids(), store_, all, policies(step.ids.front()),
                                                          roles_.rule(layer), after_.data(), own, stream, m);
        reading_.lists().pass_in_step(layer, m, steps_, step.sequences(), kept, first_.most_tokens_kept(),
                                      prompts_.columns(layer), stream);
        if (filters) continue;
        store_.keep_in_place(all, kept, stream);
        steps_.scatter(store_.length_column(), layer, step.sequences(), stream);
      }
      reading_.rebuild(layer, steps_.ids(), store_, all, stream);
    }
  }
  /// What a step that chooses leaves of a layer that will hold `before`, or lets through; then on the host's books.
  token_bound bound_in_step(sequence_layer owner, const token_bound& before, index_t own) const {
    if constexpr (fires_in_steps<typename Recipe::schedule_type>) {
      if (!prompts_.columns(owner.layer).bits)
        return first_.bound_in_step(owner.layer, before, policies(owner.id), own);
    }
    return before;
  }
  void note_choice(sequence_layer owner, index_t own) {
    if constexpr (fires_in_steps<typename Recipe::schedule_type>) {
      const token_bound before = store_.bound(owner), after = bound_in_step(owner, before, own);
      if (filters) return reading_.lists().passed_in_step(owner, after);
      // Only where all heads are known to be equally long is the room that this makes known too.
      store_.shrank(owner, after, first_.heads_are_even ? before.longest - after.longest : 0);
    }
  }
  /// Room for the lists of a step, of every layer or of none.
  void plan_lists(const sequence_layers& owners, const batch& step) {
    host_vector<index_t> longest;
    for (const sequence_layer owner : owners) {
      if (!filters || !step.evicts_last) break;
      token_bound held = store_.bound(owner);
      held.longest += step.tokens;
      longest.push_back(roles_.follows_recipe(owner.layer) ? bound_in_step(owner, held, 0).longest : 0);
    }
    reading_.lists().plan_room(owners, step.tokens, longest);
  }
  /// Room for a step in every layer, or in none.
  void make_step_room(const sequence_layers& owners, const batch& step, cudaStream_t stream) {
    store_.finish_layer(stream);  // lest it ends within the step, and moves rows
    slide(owners, stream);
    store_.settle(step.ids, false, stream);
    store_.plan_packing(owners, 0, stream);
    for (const sequence_layer owner : owners) {
      if (roles_.follows_recipe(owner.layer)) reading_.require_fits(owner, store_, step.tokens);
    }
    store_.plan_room(owners, step.tokens, stream);
    try {
      plan_lists(owners, step);
    } catch (...) {
      store_.abandon();
      throw;
    }
    store_.commit_room(owners, stream);
    store_.commit_packing(stream);
    reading_.lists().commit_room(owners, stream);
  }
  /// What a step will have appended and chosen, on the host's books.
  void note_step(const sequence_layers& owners, const batch& step) {
    for (const sequence_layer owner : owners) {
      store_.took(owner, step.tokens);
      reading_.lists().took(owner, step.tokens);
      if ((step.evicts_first || step.evicts_last) && roles_.follows_recipe(owner.layer))
        note_choice(owner, step.evicts_last ? 0 : step.tokens);
    }
  }
  /// What a step reads of a layer that follows the recipe, which holds its tokens already.
  void read(index_t layer, const view_type& all, const rows_view<const T>& q, const rows_view<Out>& out,
            const rows_view<float>& lse, selection_view& chosen, cudaStream_t stream) {
    const group_members& members = first_.members();
    for (index_t m = 0; m < members.count(); ++m) {
      const auto view = reading_.batch_view(layer, all, m);
      const logit_rule rule = members.rule(roles_.rule(layer), m, stream);
      if (!reading_.reader().choose(layer, reading_.shown(store_, all, view), q, first_position_.data(), rule, out, lse,
                                    chosen, stream)) {
        attention_.step(decode_problem<read_view_type, Out>{view, members.of(q, m), first_position_.data(), rule,
                                                            members.of(out, m), members.of(lse, m), chosen,
                                                            reading_.lists().usual_row(recipe_.budget())},
                        stream);
      }
    }
    reading_.reader().complete(layer, steps_.ids(), reading_.batch_view(layer, all), out, stream);
  }
  void trace(index_t layer, const batch& step, const selection_view& read) {
    for (index_t b = 0; b < step.sequences(); ++b) {
      const index_t id = step.ids[std::size_t(b)];
      auto& attended = attended_[sequence_layer{layer, id}];
      attended = downloaded_lists({layer, id});
      for (index_t h = 0; read.indices && h < shape_.kv_heads; ++h) {
        const offset_t row = offset_t(b) * shape_.kv_heads + h;
        const auto list = downloaded(read.row(row), std::size_t(downloaded(read.counts + row, 1)[0]));
        const auto all = std::exchange(attended[std::size_t(h)], reading_.reader().slots(store_, {layer, id}, list));
        for (index_t& slot : attended[std::size_t(h)]) slot = all[std::size_t(slot)];
      }
    }
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
