// Runs a conversation through a cache in one shot, through another in chunks, and through the reference.
#pragma once

#include "catch.hpp"

#include <optional>

#include "reference.hpp"
#include "support/tolerance.hpp"

namespace methods_test {

struct turn {
  index_t prompt;
  std::vector<index_t> steps{};  // tokens of each decode step
};

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

inline void prefill(any_cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    cache.prefill(layer, id, data.queries(layer, first, count), data.keys(layer, first, count),
                  data.values(layer, first, count));
  }
}

/// Outputs and log-sum-exps of one step in all layers, one after another.
inline std::vector<float> decode(any_cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
  const std::size_t rows = std::size_t(data.shape.layers * count * data.shape.q_heads);
  std::vector<float> results(rows * (dim + 1), 1e9f);
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    const offset_t at = offset_t(layer) * count * data.shape.q_heads;
    cache.decode(layer, {id}, data.queries(layer, first, count), data.keys(layer, first, count),
                 data.values(layer, first, count),
                 tessera::nhd_rows(results.data() + at * dim, count, data.shape.q_heads, dim),
                 tessera::nhd_rows(results.data() + rows * dim + at, count, data.shape.q_heads, 1));
  }
  return results;
}

/// Compares one choice; where rounding leaves it open, what was chosen must score as well as the reference's choice.
inline void compare(const std::vector<index_t>& got, const choice& expected, tally& counts) {
  ++counts.compared;
  if (!expected.ambiguous) {
    REQUIRE(got == expected.positions);
    return;
  }
  ++counts.ambiguous;
  for (std::size_t i = 1; i < got.size(); ++i) REQUIRE(got[i] > got[i - 1]);
  const auto mass = [&](const std::vector<index_t>& positions) {
    double total = 0;
    for (std::size_t i = 0; i < expected.stored.size(); ++i) {
      const bool chosen = std::binary_search(positions.begin(), positions.end(), expected.stored[i]);
      if (chosen && std::isfinite(expected.scores[i])) total += expected.scores[i];
    }
    return total;
  };
  if (got.size() == expected.positions.size()) {
    REQUIRE(mass(got) ==
            Approx(mass(expected.positions)).epsilon(1e-3).margin(double(got.size()) * expected.slack + 1e-12));
  }
}

inline void compare_kept(const any_cache& cache, index_t id, const model_data& data, reference_cache& reference,
                         const std::vector<choice>& expected, tally& counts) {
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    for (index_t head = 0; head < data.shape.kv_heads; ++head) {
      CAPTURE(layer, head);
      // A filter drops nothing; what it lets through is its choice.
      if (reference.made_of().filters) REQUIRE(cache.positions(layer, id, head) == reference.stored(layer, head));
      const auto kept =
          reference.made_of().filters ? cache.readable(layer, id, head) : cache.positions(layer, id, head);
      if (expected.empty()) {
        REQUIRE(kept == reference.readable(layer, head));
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
      CAPTURE(layer, head);
      REQUIRE(chunked.positions(layer, id, head) == whole.positions(layer, id, head));
      REQUIRE(chunked.readable(layer, id, head) == whole.readable(layer, id, head));
    }
  }
}

inline void run_conversation(rng& random, const settings& chosen, const model_data& data,
                             const std::vector<turn>& turns, const std::shared_ptr<tessera::cpu::executor>& workers,
                             tally& counts) {
  const auto whole = make_cache(chosen, data.shape, workers), chunked = make_cache(chosen, data.shape, workers);
  const traits& made_of = traits_of(chosen.method);
  std::optional<reference_cache> reference;  // none for policies that nobody wrote a reference for
  if (made_of.has_reference()) reference.emplace(chosen, data);
  const index_t id = whole->open();
  REQUIRE(chunked->open() == id);
  whole->trace_attended(true);
  index_t next = 0;
  for (const turn& now : turns) {
    prefill(*whole, id, data, next, now.prompt);
    for (index_t done = 0; done < now.prompt;) {
      const index_t chunk = random.between(1, now.prompt - done);
      prefill(*chunked, id, data, next + done, chunk);
      done += chunk;
    }
    if (reference) reference->prefill(now.prompt);
    next += now.prompt;
    whole->end_prefill(id);
    chunked->end_prefill(id);
    compare_caches(*whole, *chunked, id, data.shape);
    if (reference) {
      compare_kept(*whole, id, data, *reference, reference->end_prefill(), counts);
      if (made_of.plans) REQUIRE(whole->plan(id).retained == reference->plan().retained);
      if (made_of.reads != traits::second::none) REQUIRE(whole->plan(id).read == reference->plan().read);
    }
    for (const index_t count : now.steps) {
      const auto results = decode(*whole, id, data, next, count);
      REQUIRE(support::same_bits(results, decode(*chunked, id, data, next, count)));
      if (reference) reference->begin_step(count);
      std::vector<choice> choices(std::size_t(data.shape.layers * data.shape.kv_heads));
      for (index_t layer = 0; layer < data.shape.layers && reference; ++layer) {
        for (index_t head = 0; head < data.shape.kv_heads; ++head) {
          CAPTURE(layer, head, next);
          choice& expected = choices[std::size_t(layer * data.shape.kv_heads + head)];
          expected = reference->read(layer, head, count);
          compare(whole->attended(layer, id)[std::size_t(head)], expected, counts);
        }
      }
      const double most = made_of.reads == traits::second::sparq ? 1e-4 : 1e-5;  // masses are estimates in fp32
      REQUIRE(worst_error(*whole, id, data, chosen, next, count, results, choices) < most);
      next += count;
      compare_caches(*whole, *chunked, id, data.shape);
      if (reference) compare_kept(*whole, id, data, *reference, reference->end_step(count), counts);
    }
    REQUIRE(whole->next_position(id) == next);
  }
}

}  // namespace methods_test
