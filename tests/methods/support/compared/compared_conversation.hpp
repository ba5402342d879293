// Runs a conversation through a cache in one shot, through another in chunks, and through the reference.
#pragma once

#include "catch.hpp"

#include <iostream>
#include <numeric>
#include <optional>
#include <string>

#include "methods/support/conversation.hpp"
#include "reference.hpp"
#include "support/shrink/shortest_failure.hpp"
#include "support/shrink/shrink_shape.hpp"

namespace methods_test {

using support::listed;
using support::must;

inline index_t token_count(const std::vector<turn>& turns) {
  index_t total = 0;
  for (const turn& t : turns) {
    total += t.prompt;
    for (const index_t step : t.steps) total += step;
  }
  return total;
}

/// How many choices were compared with the reference, and how many of them rounding left open.
struct tally {
  index_t compared = 0, ambiguous = 0;
};

/// Compares one choice; where rounding leaves it open, what was chosen must score as well as the reference's choice.
inline void compare(const std::vector<index_t>& got, const choice& expected, tally& counts) {
  ++counts.compared;
  if (!expected.ambiguous) {
    must(got == expected.positions, "choices are the reference's", "got ", listed(got), ", of the reference ",
         listed(expected.positions));
    return;
  }
  ++counts.ambiguous;
  for (std::size_t i = 1; i < got.size(); ++i) must(got[i] > got[i - 1], "positions ascend", listed(got));
  const auto mass = [&](const std::vector<index_t>& positions) {
    double total = 0;
    for (std::size_t i = 0; i < expected.stored.size(); ++i) {
      const bool chosen = std::binary_search(positions.begin(), positions.end(), expected.stored[i]);
      if (chosen && std::isfinite(expected.scores[i])) total += expected.scores[i];
    }
    return total;
  };
  if (got.size() == expected.positions.size()) {
    const double best = mass(expected.positions);
    must(mass(got) == Approx(best).epsilon(1e-3).margin(double(got.size()) * expected.slack + 1e-12),
         "where rounding leaves a choice open, it scores as well as the reference's", "got ", mass(got), " of ", best);
  }
}

inline void compare_kept(const any_cache& cache, index_t id, const model_data& data, reference_cache& reference,
                         const std::vector<choice>& expected, tally& counts) {
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    for (index_t head = 0; head < data.shape.kv_heads; ++head) {
      // A filter drops nothing; what it lets through is its choice.
      if (reference.made_of().filters)
        must(cache.positions(layer, id, head) == reference.stored(layer, head), "a filter drops nothing");
      const auto kept =
          reference.made_of().filters ? cache.readable(layer, id, head) : cache.positions(layer, id, head);
      if (expected.empty()) {
        must(kept == reference.readable(layer, head), "what a step may read is the reference's", "layer ", layer,
             ", head ", head, ": got ", listed(kept), ", of the reference ", listed(reference.readable(layer, head)));
      } else {
        compare(kept, expected[std::size_t(layer * data.shape.kv_heads + head)], counts);
        reference.adopt(layer, head, kept);
      }
    }
  }
}

/// Gives what attended tokens lack of a row's estimated mass to the mean of V up to the row.
inline void add_mean_value(const model_data& data, const choice& expected, const std::vector<index_t>& attended,
                           index_t layer, index_t token, index_t q_head, index_t row, std::vector<double>& out) {
  if (expected.probabilities.empty()) return;
  const auto& probabilities = expected.probabilities[std::size_t(row)];
  double held = 0, whole = 0, tokens = 0;
  std::vector<double> mean(out.size(), 0.0);
  for (std::size_t i = 0; i < expected.stored.size(); ++i) {
    whole += probabilities[i];
    if (std::binary_search(attended.begin(), attended.end(), expected.stored[i])) held += probabilities[i];
    if (expected.stored[i] > token) continue;
    ++tokens;
    const float* value = data.value(layer, expected.stored[i], q_head / data.group());
    for (std::size_t d = 0; d < out.size(); ++d) mean[d] += double(value[d]);
  }
  if (whole == 0) return;
  for (std::size_t d = 0; d < out.size(); ++d) out[d] = held * out[d] + (1 - held) * mean[d] / tokens;
}

/// Error of a step's results against attention in double over exactly what the step says that it attended.
/// `choices`, by layer and kv_head, say which mass that is, where it matters.
inline double worst_error(const any_cache& cache, index_t id, const model_data& data, const settings& chosen,
                          index_t first, index_t count, const std::vector<float>& results,
                          const std::vector<choice>& choices) {
  const std::size_t rows = results.size() / (dim + 1);
  double worst = 0;
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    const auto attended = cache.attended(layer, id);
    for (index_t t = 0; t < count; ++t) {
      for (index_t h = 0; h < data.shape.q_heads; ++h) {
        const std::size_t row = std::size_t((layer * count + t) * data.shape.q_heads + h);
        const index_t head = h / data.group();
        auto expected = data.attend(chosen.rule, layer, first + t, h, attended[std::size_t(head)]);
        const choice& known = choices[std::size_t(layer * data.shape.kv_heads + head)];
        if (!known.probabilities.empty() && known.ambiguous) continue;  // other channels, other masses
        add_mean_value(data, known, attended[std::size_t(head)], layer, first + t, h,
                       t * data.group() + h % data.group(), expected.out);
        worst = std::max({worst, support::row_error(results.data() + row * dim, expected.out),
                          support::number_error(results[rows * dim + row], expected.lse)});
      }
    }
  }
  return worst;
}

/// What the caches store and may read is the same in one shot and in chunks.
inline void compare_caches(const any_cache& whole, const any_cache& chunked, index_t id,
                           const tessera::model_shape& shape) {
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    for (index_t head = 0; head < shape.kv_heads; ++head) {
      const bool is_same = chunked.positions(layer, id, head) == whole.positions(layer, id, head) &&
                           chunked.readable(layer, id, head) == whole.readable(layer, id, head);
      must(is_same, "a prompt in chunks is kept as in one shot", "layer ", layer, ", head ", head);
    }
  }
}

/// What a conversation is held with.
struct conversation_setup {
  const settings& chosen;
  const model_data& data;
  std::shared_ptr<tessera::cpu::executor> workers;
};

/// Throws broken_rule where the cache does not do what the reference does, or does something else in chunks.
inline void run_conversation(const conversation_setup& setup, const std::vector<turn>& turns, tally& counts) {
  const settings& chosen = setup.chosen;
  const model_data& data = setup.data;
  const auto whole = make_cache(chosen, data.shape, setup.workers),
             chunked = make_cache(chosen, data.shape, setup.workers);
  const traits& made_of = traits_of(chosen.method);
  std::optional<reference_cache> reference;  // none for policies that nobody wrote a reference for
  if (made_of.has_reference()) reference.emplace(chosen, data);
  const index_t id = whole->open();
  must(chunked->open() == id, "caches open the same id");
  whole->trace_attended(true);
  index_t next = 0;
  for (const turn& now : turns) {
    prefill(*whole, id, data, next, now.prompt);
    index_t first = next;
    for (const index_t chunk : now.chunks) {
      prefill(*chunked, id, data, first, chunk);
      first += chunk;
    }
    if (reference) reference->prefill(now.prompt);
    next += now.prompt;
    whole->end_prefill(id);
    chunked->end_prefill(id);
    compare_caches(*whole, *chunked, id, data.shape);
    if (reference) {
      compare_kept(*whole, id, data, *reference, reference->end_prefill(), counts);
      if (made_of.plans)
        must(whole->plan(id).retained == reference->plan().retained, "plans retain what the reference's do");
      if (made_of.reads != traits::second::none)
        must(whole->plan(id).read == reference->plan().read, "plans read what the reference's do");
    }
    for (const index_t count : now.steps) {
      const auto results = decode(*whole, id, data, next, count);
      must(support::same_bits(results, decode(*chunked, id, data, next, count)),
           "a step after a prompt in chunks has the bits of one after a prompt in one shot");
      if (reference) reference->begin_step(count);
      std::vector<choice> choices(std::size_t(data.shape.layers * data.shape.kv_heads));
      for (index_t layer = 0; layer < data.shape.layers && reference; ++layer) {
        for (index_t head = 0; head < data.shape.kv_heads; ++head) {
          choice& expected = choices[std::size_t(layer * data.shape.kv_heads + head)];
          expected = reference->read(layer, head, count);
          compare(whole->attended(layer, id)[std::size_t(head)], expected, counts);
        }
      }
      const double most = made_of.reads == traits::second::sparq ? 1e-4 : 1e-5;  // masses are estimates in fp32
      const double error = worst_error(*whole, id, data, chosen, next, count, results, choices);
      must(error < most, "outputs are attention over what was attended", "error ", error);
      next += count;
      compare_caches(*whole, *chunked, id, data.shape);
      if (reference) compare_kept(*whole, id, data, *reference, reference->end_step(count), counts);
    }
    must(whole->next_position(id) == next, "the next position follows the tokens so far");
  }
}

/// Fewer steps and chunks, and fewer tokens in them.
struct simpler_turns {
  using list = std::vector<turn>;

  std::vector<list> operator()(const list& turns, std::size_t index) const {
    std::vector<list> lists;
    const auto with = [&](const auto& change) {
      lists.push_back(turns);
      turn& changed = lists.back()[index];
      change(changed);
      changed.prompt = std::accumulate(changed.chunks.begin(), changed.chunks.end(), index_t(0));
    };
    const turn& now = turns[index];
    for (const auto part : {&turn::steps, &turn::chunks}) {
      const index_t least = part == &turn::steps ? 0 : 1;  // a turn has a prompt
      for (std::size_t i = 0; i < (now.*part).size(); ++i) {
        if (index_t((now.*part).size()) > least)
          with([&](turn& changed) { (changed.*part).erase((changed.*part).begin() + std::ptrdiff_t(i)); });
        const index_t tokens = (now.*part)[i];
        for (const index_t fewer : {index_t(1), tokens / 2, tokens - 1}) {
          if (fewer >= 1 && fewer < tokens) with([&](turn& changed) { (changed.*part)[i] = fewer; });
        }
      }
    }
    if (now.chunks.size() > 1) with([&](turn& changed) { changed.chunks = {now.prompt}; });
    return lists;
  }
};

/// The rule that a conversation breaks, after its shortest form has been printed; empty: none.
inline std::string wrong_of(const conversation_setup& setup, const std::vector<turn>& turns, tally& counts) {
  const auto found = support::failure_of([&] { run_conversation(setup, turns, counts); });
  if (!found) return {};
  const auto run_with = [&](const model_data& data, const std::vector<turn>& list) {
    tally unused;
    return support::failure_of([&] { run_conversation({setup.chosen, data, setup.workers}, list, unused); });
  };
  // The model first: each try of the turns then takes less time.
  const auto parts = support::fewest_parts(setup.data.shape, [&](const support::shape_parts& some) {
    const auto broken = run_with(model_data(setup.data, some), turns);
    return broken && broken->rule == found->rule;
  });
  const model_data data(setup.data, parts);
  const auto replay = [&](const std::vector<turn>& list) { return run_with(data, list); };
  const auto as_code = [](const turn& now) {  // the initializer of a turn
    return "{" + std::to_string(now.prompt) + ", " + listed(now.steps) + ", " + listed(now.chunks) + "},";
  };
  std::cout << support::shortest_failure(turns, *found, replay, as_code, simpler_turns{}) << "with " << parts.text()
            << std::endl;
  return found->rule;
}

}  // namespace methods_test
