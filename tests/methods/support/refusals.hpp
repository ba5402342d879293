// Caches that are refused something in the middle of their work.
#pragma once

#include "catch.hpp"

#include <functional>

#include "methods/support/conversation.hpp"

namespace methods_test {

inline std::shared_ptr<tessera::cpu::executor> one_thread() { return std::make_shared<tessera::cpu::executor>(1); }

inline const tessera::model_shape shape{2, 4, 2};

/// The message of the tessera::error that an action throws.
inline std::string said(const std::function<void()>& action) {
  try {
    action();
  } catch (const tessera::error& refusal) {
    return refusal.what();
  }
  return "nothing was thrown";
}

inline std::string said_on_making(const settings& chosen, const tessera::model_shape& of = shape) {
  return said([&] { make_cache(chosen, of, one_thread()); });
}

/// A cache in the middle of its work, to be refused something.
struct working {
  std::unique_ptr<any_cache> cache;
  model_data data;
  index_t id, next = 0;
  bool in_prompt = false;

  explicit working(const settings& chosen)
      : cache(make_cache(chosen, shape, one_thread())), data(make_data()), id(cache->open()) {}

  void prompt(index_t tokens) {
    prefill(*cache, id, data, next, tokens);
    next += tokens;
    in_prompt = true;
  }
  void end_prompt() {
    cache->end_prefill(id);
    in_prompt = false;
  }

  /// Refused with these words in the message, and everything is as before: what is stored, and what comes next.
  void refuses(const std::string& words, const std::function<void(any_cache&)>& action) {
    CAPTURE(words);
    const auto untouched = cache->clone();
    const auto bytes = cache->bytes(id);
    const auto message = said([&] { action(*cache); });
    CHECK_THAT(message, contains(words));
    CHECK_THAT(message, contains("; expected "));
    CHECK(cache->bytes(id) == bytes);
    CHECK(cache->next_position(id) == untouched->next_position(id));
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      for (index_t head = 0; head < shape.kv_heads; ++head) {
        CHECK(cache->positions(layer, id, head) == untouched->positions(layer, id, head));
      }
    }
    const auto continued = cache->clone();
    CHECK(support::same_bits(go_on(*continued), go_on(*untouched)));
  }

 private:
  std::vector<float> go_on(any_cache& copy) const {
    index_t at = next;
    if (in_prompt) {
      prefill(copy, id, data, at, 2);
      copy.end_prefill(id);
      at += 2;
    }
    return decode(copy, id, data, at, 1);
  }

  static model_data make_data() {
    rng random(161);
    return {random, shape, 120};
  }
};

/// Somewhere to write that nobody looks at.
struct sink {
  std::vector<float> memory = std::vector<float>(100 * 4 * dim);
  tessera::rows_view<float> rows(index_t tokens, index_t heads = 4, index_t sequences = 1) {
    return tessera::nhd_rows(memory.data(), tokens, heads, dim, sequences);
  }
};

}  // namespace methods_test
