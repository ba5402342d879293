// Caches that get the same calls, and what must be the same of them afterwards.
#pragma once

#include "catch.hpp"

#include <cmath>
#include <functional>
#include <optional>
#include <string>

#include "cache_call.hpp"
#include "support/shrink/must.hpp"
#include "support/tolerance.hpp"

namespace support {

/// Choices that two backends have made alike, and those in which rounding swapped tokens at the cut.
struct agreement {
  long compared = 0, swapped = 0;
};

/// A cache, and a second one that only ever gets calls which the contract allows: after a refused call both go on alike, to
/// the bit. A third one of another backend, if there is one, goes on alike to rounding, until a choice differs by what
/// rounding explains.
class compared_caches {
 public:
  using making = std::function<std::unique_ptr<called_cache>()>;

 protected:
  using call_type = std::function<void(called_cache&)>;

  compared_caches(const tessera::model_shape& shape, const called_limits& limits, const making& make,
                  std::unique_ptr<called_cache> reference, agreement* seen)
      : shape_(shape), limits_(limits), cache_(make()), twin_(make()), reference_(std::move(reference)), seen_(seen) {
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
      const std::string said = refusal.what();
      must(said.find("; expected ") != std::string::npos, "a refusal says what is expected", said);
      return said;
    }
  }
  // `allowed` empty: the contract leaves it to the parameters, and both caches must agree. Returns whether it was carried
  // out: by the cache, the twin and the reference, in this order.
  bool apply(std::optional<bool> allowed, const call_type& made) {
    turn_ = 0;
    const std::string said = outcome(*cache_, made);
    if (allowed && *allowed) must(said.empty(), "what the contract allows is not refused", said);
    if (allowed && !*allowed) must(!said.empty(), "what the contract forbids is refused");
    if (!said.empty()) {
      turn_ = 1;
      if (!allowed) must(!outcome(*twin_->copy(), made).empty(), "a twin refuses what the cache refuses", said);
      return false;
    }
    turn_ = 1;
    must(outcome(*twin_, made) == said, "a twin takes what the cache takes");
    turn_ = 2;
    if (reference_) must(outcome(*reference_, made) == said, "the other backend takes what the cache takes");
    return true;
  }

  /// Outputs for whoever's turn it is.
  std::pair<called_cache::results, called_cache::results> take(const wanted_output& wanted) {
    return written(wanted, outputs_[turn_].out, outputs_[turn_].lse);
  }
  std::pair<called_cache::results, called_cache::results> written(const wanted_output& wanted, std::vector<float>& out,
                                                                  std::vector<float>& lse) const {
    return {written(wanted, wanted.out, out, cache_call::dim), written(wanted, wanted.lse, lse, 1)};
  }

  void compare_outputs() {
    const auto &own = outputs_[0], &other = outputs_[1], &expected = outputs_[2];
    must(same_bits(own.out, other.out), "a twin's outputs are the cache's to the bit");
    must(same_bits(own.lse, other.lse), "a twin's log-sum-exps are the cache's to the bit");
    if (!reference_) return;
    double difference = 0, size = 1e-30;
    for (std::size_t i = 0; i < own.out.size(); ++i) {
      difference += (double(own.out[i]) - expected.out[i]) * (double(own.out[i]) - expected.out[i]);
      size += double(expected.out[i]) * expected.out[i];
    }
    const double error = std::sqrt(difference / size);
    must(error < 8e-3, "outputs are the other backend's", "relative error ", error);  // false for what is not a number
    must(own.lse.size() == expected.lse.size(), "log-sum-exps are as many as the other backend's");
    for (std::size_t i = 0; i < own.lse.size(); ++i) {
      must(own.lse[i] == Approx(expected.lse[i]).margin(4e-3), "log-sum-exps are the other backend's", "number ", i,
           ": ", own.lse[i], ", of the other ", expected.lse[i]);
    }
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
    must(std::is_sorted(got.begin(), got.end()), "positions ascend", listed(got));
    const bool is_near =
        std::abs(offset_t(expected.size()) - offset_t(got.size())) <= 1 &&  // adaptive budgets count by score too
        index_t(missing.size()) <= reference_->chosen_together(id);
    must(is_near, "what is chosen is the other backend's but for scores that are equal to rounding", "got ",
         listed(got), ", of the other ", listed(expected));
    ++seen_->swapped;
    reference_.reset();
  }

  tessera::model_shape shape_;
  called_limits limits_;
  std::unique_ptr<called_cache> cache_, twin_, reference_;
  int turn_ = 0;  // whose call it is: the cache's, the twin's, the reference's
  struct output {
    std::vector<float> out, lse;
  };
  output outputs_[3];

 private:
  called_cache::results written(const wanted_output& wanted, called_cache::results shape, std::vector<float>& to,
                                index_t width) const {
    to.assign(std::size_t(std::max(0, wanted.tokens) * shape_.q_heads * width * std::max(0, wanted.sequences)) + 1,
              0.0f);
    if (shape.data) shape.data = to.data();
    return shape;
  }

  agreement* seen_;
};

}  // namespace support
