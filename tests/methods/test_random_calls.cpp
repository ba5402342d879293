// Calls in random order with random arguments, valid and not, against a model of what a cache promises.
#include "catch.hpp"

#include <cstdlib>
#include <optional>

#include "methods/support/conversation.hpp"

using namespace methods_test;
using tessera::nhd_rows;

namespace {

/// Calls that every method gets in an ordinary run; TESSERA_RANDOM_CALLS asks for another number in all.
index_t calls_of_a_method() {
  const char* wanted = std::getenv("TESSERA_RANDOM_CALLS");
  return wanted ? std::max(1, std::atoi(wanted) / int(all_methods().size())) : support::scaled(1000);
}

/// What the contract says of one sequence.
struct expected_sequence {
  std::vector<index_t> next, turn;  // by layer: tokens seen, and those of the prompt that has not ended
};

/// A cache, a second one that only ever gets calls which the contract allows, and the model that tells those apart.
/// After a refused call both go on alike, to the bit.
class twins {
 public:
  twins(const std::string& method, support::rng& random)
      : random_(random),
        shape_{random.between(1, 3), random.pick({2, 4}), random.pick({1, 2})},
        read_(random.pick({16, 24, 40})) {
    if (shape_.q_heads % shape_.kv_heads != 0) shape_.q_heads = shape_.kv_heads;
    settings chosen{method, read_};
    for (const number& one : numbers_of(method)) {
      has_budget_ = has_budget_ || one.name == "budget";
      if (one.name == "window") chosen.values["window"] = random.between(1, 4);
      if (one.name == "max_new") chosen.values["max_new"] = random.between(4, 12);
    }
    has_two_ = traits_of(method).scorer != traits::first::none;
    exact_ = method.find("exact") != std::string::npos && !traits_of(method).plans;
    const auto workers = std::make_shared<tessera::cpu::executor>(1);
    cache_ = make_cache(chosen, shape_, workers);
    twin_ = make_cache(chosen, shape_, workers);
    memory_ = support::normals(random, 4 * 12 * 6 * std::size_t(dim));
  }

  void call() {
    switch (random_.between(0, 11)) {
      case 0:
        return open();
      case 1:
        return close();
      case 2:
      case 3:
        return prefill_somewhere();
      case 4:
        return prefill_everywhere();
      case 5:
        return attend_prompt();
      case 6:
      case 7:
        return end_prompt();
      case 8:
      case 9:
        return decode_everywhere();
      case 10:
        return decode_somewhere();
      default:
        return random_.chance(0.7) ? look() : change();
    }
  }

 private:
  using call_type = std::function<void(any_cache&)>;

  // Applies a call. `allowed` empty: the contract leaves it to the parameters, and both caches must agree.
  // Returns whether it was carried out.
  bool apply(const char* call, std::optional<bool> allowed, const call_type& made) {
    CAPTURE(call);
    const auto outcome = [&](any_cache& to) {
      try {
        made(to);
        return std::string();
      } catch (const tessera::error& refusal) {
        CHECK_THAT(refusal.what(), contains("; expected "));
        return std::string(refusal.what());
      }
    };
    const std::string said = outcome(*cache_);
    if (allowed) {
      CAPTURE(said);
      REQUIRE(said.empty() == *allowed);
    }
    if (allowed && !*allowed) return false;
    const auto before = allowed ? nullptr : twin_->clone();
    REQUIRE(outcome(*twin_) == said);
    if (!said.empty()) twin_ = before->clone();  // what a refused call may have touched is gone
    return said.empty();
  }

  index_t some_id() {
    return random_.chance(0.85) && !model_.empty() ? random_.between(0, index_t(model_.size()) - 1)
                                                   : random_.between(-2, 9);
  }
  index_t some_layer() {
    return random_.chance(0.9) ? random_.between(0, shape_.layers - 1)
                               : random_.pick({-1, int(shape_.layers), 1 << 30});
  }
  expected_sequence* known(index_t id) {
    return id >= 0 && id < index_t(model_.size()) && model_[std::size_t(id)] ? &*model_[std::size_t(id)] : nullptr;
  }
  bool is_layer(index_t layer) const { return layer >= 0 && layer < shape_.layers; }
  index_t some_head() {
    return random_.chance(0.9) ? random_.between(0, shape_.kv_heads - 1)
                               : random_.pick({-1, int(shape_.kv_heads), 1 << 30});
  }
  bool is_head(index_t head) const { return head >= 0 && head < shape_.kv_heads; }
  // Log-sum-exps that are wanted, or not, or of a shape that a call must refuse; `right` says which.
  any_cache::results some_lse(index_t tokens, index_t sequences, bool& right) {
    right = true;
    if (random_.chance(0.5)) return {};
    any_cache::results rows = nhd_rows(lse_.data(), tokens, shape_.q_heads, 1, sequences);
    if (random_.chance(0.1)) {
      (random_.chance(0.5) ? rows.tokens : random_.chance(0.5) ? rows.heads : rows.sequences) += random_.pick({-1, 1});
      right = false;
    }
    return rows;
  }
  any_cache::rows rows(index_t tokens, index_t heads, index_t sequences = 1) {
    return nhd_rows<const float>(memory_.data() + random_.between(0, 40), tokens, heads, dim, sequences);
  }
  any_cache::results results(std::vector<float>& to, index_t tokens, index_t sequences = 1) {
    to.assign(std::size_t(sequences * tokens * shape_.q_heads) * dim, 0.0f);
    return nhd_rows(to.data(), tokens, shape_.q_heads, dim, sequences);
  }

  void open() {
    if (model_.size() > 4 && random_.chance(0.7)) return;
    const auto free = std::find(model_.begin(), model_.end(), std::nullopt) - model_.begin();
    if (std::size_t(free) == model_.size()) model_.emplace_back();
    const auto layers = std::size_t(shape_.layers);
    model_[std::size_t(free)] = expected_sequence{std::vector<index_t>(layers, 0), std::vector<index_t>(layers, 0)};
    REQUIRE(cache_->open() == free);
    REQUIRE(twin_->open() == free);
  }

  void close() {
    const index_t id = some_id();
    expected_sequence* sequence = known(id);
    // Mostly those that have grown long, or that no order of calls can bring to an end any more.
    if (sequence && sequence->next[0] < 60 && random_.chance(0.8)) return;
    if (apply("close", sequence != nullptr, [&](any_cache& cache) { cache.close(id); }))
      model_[std::size_t(id)].reset();
  }

  bool prefill(index_t layer, index_t id, index_t tokens, index_t queries, index_t kv_heads, index_t v_tokens) {
    expected_sequence* sequence = known(id);
    if (sequence && sequence->next[0] > 90) return false;
    const bool shapes =
        kv_heads == shape_.kv_heads && tokens == v_tokens && tokens >= 1 && queries >= 0 && queries <= tokens;
    std::optional<bool> allowed = sequence && is_layer(layer) && shapes;
    if (*allowed && queries < tokens) allowed.reset();  // as the scorer needs
    auto q = rows(queries, shape_.q_heads), k = rows(tokens, kv_heads), v = rows(v_tokens, kv_heads);
    if (random_.chance(0.02)) {
      (random_.chance(0.5) ? k : v).sequences = random_.pick({0, 2, -1});
      allowed = false;
    }
    if (!apply("prefill", allowed, [&](any_cache& cache) { cache.prefill(layer, id, q, k, v); })) return false;
    sequence->next[std::size_t(layer)] += tokens;
    sequence->turn[std::size_t(layer)] += tokens;
    return true;
  }

  void prefill_somewhere() {
    const index_t tokens = random_.between(random_.chance(0.1) ? -1 : 1, 9);
    prefill(some_layer(), some_id(), tokens, random_.chance(0.7) ? tokens : random_.between(-1, 10),
            random_.chance(0.95) ? shape_.kv_heads : random_.between(0, 3),
            random_.chance(0.95) ? tokens : random_.between(0, 9));
  }

  void prefill_everywhere() {
    const index_t id = some_id(), tokens = random_.between(1, 12);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      if (!prefill(layer, id, tokens, tokens, shape_.kv_heads, tokens)) return;
    }
  }

  void attend_prompt() {
    const index_t id = some_id(), layer = some_layer(), tokens = random_.between(0, 12);
    const expected_sequence* sequence = known(id);
    bool right;
    const auto lse = some_lse(tokens, 1, right);
    const bool allowed =
        sequence && is_layer(layer) && tokens >= 1 && tokens <= sequence->turn[std::size_t(layer)] && right;
    std::vector<float> first, second;
    const auto q = rows(tokens, shape_.q_heads);
    bool own = true;
    apply("prefill_attention", allowed, [&](any_cache& cache) {
      cache.prefill_attention(layer, id, q, results(own ? first : second, tokens), lse);
      own = false;
    });
    if (allowed) REQUIRE(support::same_bits(first, second));
  }

  void end_prompt() {
    const index_t id = some_id();
    expected_sequence* sequence = known(id);
    bool even = sequence && sequence->turn[0] >= 1;
    for (index_t layer = 0; even && layer < shape_.layers; ++layer)
      even = sequence->next[std::size_t(layer)] == sequence->next[0];
    // A plan may have no room for the window.
    const std::optional<bool> allowed = even ? std::nullopt : std::optional<bool>(false);
    if (apply("end_prefill", allowed, [&](any_cache& cache) { cache.end_prefill(id); })) {
      std::fill(sequence->turn.begin(), sequence->turn.end(), 0);
    }
  }

  bool decode(index_t layer, const std::vector<index_t>& ids, index_t tokens, index_t sequences, index_t k_tokens) {
    const bool shapes = tokens >= 1 && tokens <= 8 && tokens == k_tokens && sequences == index_t(ids.size());
    bool right;
    const auto lse = some_lse(tokens, sequences, right);
    bool allowed = shapes && right && is_layer(layer) && (!exact_ || read_ >= tokens);
    for (const index_t id : ids) {
      const expected_sequence* sequence = known(id);
      if (sequence && sequence->next[0] > 110) return false;
      allowed = allowed && sequence && std::count(ids.begin(), ids.end(), id) == 1;
      if (!allowed) break;
      const auto& next = sequence->next;
      allowed = next[std::size_t(layer)] == (layer > 0 ? next[0] - tokens : next.back()) &&
                sequence->turn[std::size_t(layer)] == 0;
      // A step begins with the first layer, when all layers stand at one place.
      for (index_t other = 0; layer == 0 && other < shape_.layers; ++other) {
        allowed = allowed && next[std::size_t(other)] == next[0] && sequence->turn[std::size_t(other)] == 0;
      }
      if (!allowed) break;
    }
    std::optional<bool> expected = allowed;
    // Later layers belong to the step that the first one began: of the same sequences.
    if (allowed && layer > 0 && (ids != step_ids_ || tokens != step_tokens_)) expected.reset();
    const auto q = rows(tokens, shape_.q_heads, sequences), k = rows(k_tokens, shape_.kv_heads, sequences),
               v = rows(k_tokens, shape_.kv_heads, sequences);
    std::vector<float> first, second;
    bool own = true;
    const bool done = apply("decode", expected, [&](any_cache& cache) {
      cache.decode(layer, ids, q, k, v, results(own ? first : second, tokens, sequences), lse);
      own = false;
    });
    if (!done) return false;
    if (layer == 0) step_ids_ = ids, step_tokens_ = tokens;
    REQUIRE(support::same_bits(first, second));
    for (const index_t id : ids) known(id)->next[std::size_t(layer)] += tokens;
    return true;
  }

  std::vector<index_t> some_ids() {
    std::vector<index_t> ids;
    for (index_t n = random_.between(random_.chance(0.05) ? 0 : 1, 3); n > 0; --n) {
      const index_t id = some_id();
      if (random_.chance(0.05) || std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    return ids;
  }

  void decode_everywhere() {
    const auto ids = some_ids();
    if (ids.empty()) return;
    const index_t tokens = random_.chance(0.5) ? 1 : random_.between(1, 8);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      if (!decode(layer, ids, tokens, index_t(ids.size()), tokens)) return;
    }
  }

  void decode_somewhere() {
    const auto ids = some_ids();
    if (ids.empty()) return;
    const index_t tokens = random_.between(0, 9);
    decode(some_layer(), ids, tokens, random_.chance(0.9) ? index_t(ids.size()) : random_.between(1, 4),
           random_.chance(0.9) ? tokens : random_.between(0, 9));
  }

  void change() {
    const index_t tokens =
        random_.chance(0.5) ? random_.between(16, 60) : random_.pick({0, -1, 3, 1 << 24, (1 << 24) + 1, 0x7fffffff});
    std::optional<bool> allowed;  // window, sinks and the like have a say
    if (has_budget_ && (tokens < 1 || tokens > 1 << 24)) allowed = false;
    if (apply("set_budget", allowed, [&](any_cache& cache) { cache.set_budget(tokens); }) && !has_two_) read_ = tokens;
    if (random_.chance(0.2)) cache_ = cache_->clone();
  }

  void look() {
    const index_t id = some_id(), layer = some_layer(), one = some_head();
    const expected_sequence* sequence = known(id);
    std::vector<index_t> seen[2];
    offset_t bytes[2] = {};
    int side = 0;
    apply("look", sequence != nullptr && is_layer(layer) && is_head(one), [&](any_cache& cache) {
      cache.positions(layer, id, one);
      cache.readable(layer, id, one);
      for (index_t head = 0; head < shape_.kv_heads; ++head) {
        for (const auto& part : {cache.positions(layer, id, head), cache.readable(layer, id, head)}) {
          seen[side].insert(seen[side].end(), part.begin(), part.end());
        }
      }
      bytes[side] = cache.bytes_read(id);
      if (sequence) REQUIRE(cache.next_position(id) == sequence->next[0]);
      ++side;
    });
    REQUIRE(seen[0] == (side == 2 ? seen[1] : seen[0]));
    REQUIRE((side < 2 || bytes[0] == bytes[1]));
  }

  support::rng& random_;
  tessera::model_shape shape_;
  index_t read_;          // what a step of exact retrieval may read
  bool has_two_ = false;  // a budget of its own for what stays: `set_budget` leaves `read_` alone
  bool exact_ = false, has_budget_ = false;
  std::unique_ptr<any_cache> cache_, twin_;
  std::vector<std::optional<expected_sequence>> model_;
  std::vector<index_t> step_ids_;  // of the step that the first layer began last
  index_t step_tokens_ = 0;
  std::vector<float> memory_;
  std::vector<float> lse_ = std::vector<float>(4 * 12 * 8);
};

}  // namespace

TEST_CASE("random calls do what the contract says, and a refused one leaves a cache as it was") {
  for (const auto& method : all_methods()) {
    CAPTURE(method);
    const index_t calls = calls_of_a_method();
    for (index_t done = 0; done < calls;) {
      CAPTURE(done);
      support::rng random(std::uint64_t(9001 + done));
      twins pair(method, random);
      for (index_t i = 0; i < 250 && done < calls; ++i, ++done) pair.call();
    }
  }
}
