// Caches that get the same calls, and what must be the same of them afterwards.
#pragma once

#include "catch.hpp"

#include <cmath>
#include <functional>
#include <optional>
#include <string>

#include "call_arguments.hpp"
#include "support/tolerance.hpp"

namespace support {

/// Choices that two backends have made alike, and those in which rounding swapped tokens at the cut.
struct agreement {
  long compared = 0, swapped = 0;
};

/// A cache, and a second one that only ever gets calls which the contract allows: after a refused call both go on alike, to
/// the bit. A third one of another backend, if there is one, goes on alike to rounding, until a choice differs by what
/// rounding explains.
class compared_caches : public call_arguments {
 public:
  using making = std::function<std::unique_ptr<called_cache>()>;

 protected:
  using call_type = std::function<void(called_cache&)>;

  compared_caches(rng& random, const tessera::model_shape& shape, const called_limits& limits, const making& make,
                  std::unique_ptr<called_cache> reference, agreement* seen)
      : call_arguments(random, shape, limits),
        cache_(make()),
        twin_(make()),
        reference_(std::move(reference)),
        seen_(seen) {
    if (reference_) {
      cache_->trace_attended(true);
      reference_->trace_attended(true);
    }
  }

  static std::string outcome(called_cache& to, const call_type& made) {
    try {
      made(to);
      return {};
    } catch (const tessera::error& refusal) {
      CHECK_THAT(refusal.what(), contains("; expected "));
      return refusal.what();
    }
  }
  // `allowed` empty: the contract leaves it to the parameters, and both caches must agree. Returns whether it was carried
  // out: by the cache, the twin and the reference, in this order.
  bool apply(const char* call, std::optional<bool> allowed, const call_type& made) {
    CAPTURE(call);
    turn_ = 0;
    const std::string said = outcome(*cache_, made);
    CAPTURE(said);
    if (allowed) REQUIRE(said.empty() == *allowed);
    if (!said.empty()) {
      if (!allowed) REQUIRE(outcome(*twin_->copy(), made) == said);
      return false;
    }
    turn_ = 1;
    REQUIRE(outcome(*twin_, made) == said);
    turn_ = 2;
    if (reference_) REQUIRE(outcome(*reference_, made) == said);
    return true;
  }

  std::pair<results_type, results_type> take(const wanted_output& wanted) {
    output& here = outputs_[turn_];
    return {written(wanted.out, here.out, wanted.tokens, shape_.q_heads, dim, wanted.sequences),
            written(wanted.lse, here.lse, wanted.tokens, shape_.q_heads, 1, wanted.sequences)};
  }

  void compare_outputs() {
    const auto &own = outputs_[0], &other = outputs_[1], &expected = outputs_[2];
    REQUIRE(same_bits(own.out, other.out));
    REQUIRE(same_bits(own.lse, other.lse));
    if (!reference_) return;
    double difference = 0, size = 1e-30;
    for (std::size_t i = 0; i < own.out.size(); ++i) {
      difference += (double(own.out[i]) - expected.out[i]) * (double(own.out[i]) - expected.out[i]);
      size += double(expected.out[i]) * expected.out[i];
    }
    REQUIRE(std::sqrt(difference / size) < 8e-3);  // false for what is not a number
    REQUIRE(own.lse.size() == expected.lse.size());
    for (std::size_t i = 0; i < own.lse.size(); ++i) REQUIRE(own.lse[i] == Approx(expected.lse[i]).margin(4e-3));
  }

  void compare_attended(index_t layer, const tessera::batch& now) {
    for (const index_t id : now.ids) {
      for (index_t head = 0; reference_ && head < shape_.kv_heads; ++head) {
        const auto h = std::size_t(head);
        agree(id, reference_->attended(layer, id)[h], cache_->attended(layer, id)[h]);
      }
    }
  }
  void compare_stored(index_t id) {
    for (index_t layer = 0; reference_ && layer < shape_.layers; ++layer) {
      for (index_t head = 0; reference_ && head < shape_.kv_heads; ++head) {
        agree(id, reference_->positions(layer, id, head), cache_->positions(layer, id, head));
        if (reference_) agree(id, reference_->readable(layer, id, head), cache_->readable(layer, id, head));
      }
    }
  }
  // Equal, or swapped where scores are equal to rounding: then the backends go different ways.
  void agree(index_t id, const std::vector<index_t>& expected, const std::vector<index_t>& got) {
    ++seen_->compared;
    if (expected == got) return;
    std::vector<index_t> missing;
    std::set_difference(expected.begin(), expected.end(), got.begin(), got.end(), std::back_inserter(missing));
    CAPTURE(expected, got);
    REQUIRE(std::is_sorted(got.begin(), got.end()));
    REQUIRE(std::abs(offset_t(expected.size()) - offset_t(got.size())) <= 1);  // adaptive budgets count by score too
    REQUIRE(index_t(missing.size()) <= reference_->chosen_together(id));
    ++seen_->swapped;
    reference_.reset();
  }

  std::unique_ptr<called_cache> cache_, twin_, reference_;
  int turn_ = 0;  // whose call it is: the cache's, the twin's, the reference's

 private:
  struct output {
    std::vector<float> out, lse;
  };

  agreement* seen_;
  output outputs_[3];
};

}  // namespace support
