// Every number of a method at the ends of what it may be, and beyond.
#pragma once

#include "catch.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cache_call.hpp"
#include "numbers.hpp"
#include "support/random.hpp"

namespace support {

/// A method's cache with this budget and these numbers, by their names. Throws as the cache does.
using cache_maker =
    std::function<std::unique_ptr<called_cache>(tessera::index_t budget, const std::map<std::string, double>& values)>;

inline std::unique_ptr<called_cache> make_with(const cache_maker& make, const number& one, double value,
                                               tessera::index_t budget) {
  std::map<std::string, double> values;
  if (one.name == "budget") {
    budget = tessera::index_t(value);
    values["window"] = 1;  // or no small budget has room for it
  } else {
    values[one.name] = value;
  }
  if (one.name == "layer") values["layers"] = value + 1;
  if (one.name == "layers") values["layer"] = 0;
  return make(budget, values);
}

/// Two turns with steps of one and of several tokens; every output and log-sum-exp is a number. Rows are those of `call_inputs(on_device)`.
inline void converse(called_cache& cache, const tessera::model_shape& shape, bool on_device) {
  constexpr int dim = cache_call::dim;
  const float* inputs = call_inputs(on_device).data();
  tessera::index_t next = 0;  // the first new token
  const auto rows = [&](tessera::index_t layer, tessera::index_t tokens, tessera::index_t heads, int kind) {
    return tessera::nhd_rows(inputs + 8 * (layer * 97 + kind * 31) + next * heads * dim, tokens, heads, dim);
  };
  const tessera::index_t id = cache.open();
  for (const tessera::index_t prompt : {37, 9}) {
    for (tessera::index_t layer = 0; layer < shape.layers; ++layer) {
      cache.prefill(layer, id, rows(layer, prompt, shape.q_heads, 0), rows(layer, prompt, shape.kv_heads, 1),
                    rows(layer, prompt, shape.kv_heads, 2));
    }
    next += prompt;
    cache.end_prefill(id);
    for (const tessera::index_t tokens : {1, 3}) {
      const tessera::batch step = cache.prepare_step({id}, tokens);
      cache.begin_step(step);
      for (tessera::index_t layer = 0; layer < shape.layers; ++layer) {
        const std::size_t count = std::size_t(tokens * shape.q_heads);
        std::vector<float> out(count * dim), lse(count);
        cache.decode(layer, step, rows(layer, tokens, shape.q_heads, 0), rows(layer, tokens, shape.kv_heads, 1),
                     rows(layer, tokens, shape.kv_heads, 2), tessera::nhd_rows(out.data(), tokens, shape.q_heads, dim),
                     tessera::nhd_rows(lse.data(), tokens, shape.q_heads, 1));
        for (const float x : out) REQUIRE(std::isfinite(x));
        for (const float x : lse) REQUIRE(std::isfinite(x));
      }
      next += tokens;
    }
  }
}

/// A conversation with each number at and near its ends, under several budgets: it works, or a sentence says what is
/// expected. Returns how many worked; a reduced run goes on until one has.
inline tessera::index_t take_ends(const std::vector<number>& numbers, const tessera::model_shape& shape, bool on_device,
                                  const cache_maker& make) {
  struct end {
    const number* one;
    double value;
    tessera::index_t budget;
  };
  std::vector<end> ends;
  for (const number& one : numbers) {
    for (const double value : {one.least, one.least + one.step, one.most - one.step, one.most}) {
      for (const tessera::index_t budget : {40, 16, 1 << 24}) ends.push_back({&one, value, budget});
    }
  }
  const std::size_t taken = std::size_t(std::min<double>(double(ends.size()), scaled(tessera::index_t(ends.size()))));
  tessera::index_t worked = 0;
  // Some, spread over all; then all in turn, as long as none has worked.
  for (std::size_t i = 0; i < taken + ends.size() && (i < taken || worked == 0); ++i) {
    const end& now = ends[i < taken ? i * ends.size() / taken : i - taken];
    CAPTURE(now.one->name, now.value, now.budget);
    try {
      converse(*make_with(make, *now.one, now.value, now.budget), shape, on_device);
      ++worked;
    } catch (const tessera::error& refusal) {
      CHECK_THAT(refusal.what(), contains("; expected "));
    }
  }
  return worked;
}

/// A number beyond its ends is refused by its name, with the range.
inline void refuse_beyond(const std::vector<number>& numbers, const cache_maker& make) {
  for (const number& one : numbers) {
    constexpr double huge = std::numeric_limits<tessera::index_t>::max();
    for (const double value : {one.least - one.step, one.most + one.step, -huge, huge - 100, huge}) {
      CAPTURE(one.name, value);
      std::string said = "nothing";
      try {
        if (one.name == "layer" || one.name == "layers") {
          make(1 << 24, {{one.name, value}});
        } else {
          make_with(make, one, value, 1 << 24);
        }
      } catch (const tessera::error& refusal) {
        said = refusal.what();
      }
      CHECK_THAT(said, contains(one.name + " is "));
      std::ostringstream ends;
      ends << one.least << " to " << one.most;
      const auto whole = [](double end) { return std::to_string(tessera::index_t(end)); };
      CHECK_THAT(said, contains(one.step == 1 ? whole(one.least) + " to " + whole(one.most) : ends.str()));
    }
  }
}

}  // namespace support
