// Every method over fixed pages keeps and reads what it does over runs, and gives the same bits, though the conversation goes on in one
// fork after another, and what shares pages with it writes to them.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>

#include "every_method.hpp"
#include "methods/support/layout_cases.hpp"
#include "support/calls/called_cache.hpp"

using namespace tessera;
using namespace methods_test;

namespace {

using paged = stored<dense_rows<fp32, dim>, fixed_pages<16>>;

/// A conversation of one sequence that is forked between calls, in the middle of its prompts too. It goes on in the fork or in the
/// original. The other one gets tokens of its own, and stays for a while.
template <class Recipe>
class forked_conversation {
 public:
  using rows = any_cache::rows;
  using results = any_cache::results;

  forked_conversation(const settings& chosen, std::shared_ptr<cpu::executor> workers, support::rng& random)
      : held_(chosen, std::move(workers)), random_(random) {}

  index_t open(const sequence_options& options) { return now_ = held_.open(options); }
  void prefill(index_t layer, index_t, const rows& q, const rows& k, const rows& v) {
    held_.prefill(layer, now_, q, k, v);
    if (layer + 1 == layout_shape.layers) fork(true);
  }
  void end_prefill(index_t) {
    held_.end_prefill(now_);
    fork(false);
  }
  void decode(index_t layer, const std::vector<index_t>&, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) {
    if (layer == 0) fork(false);
    held_.decode(layer, {now_}, q, k, v, out, lse);
  }
  std::vector<index_t> positions(index_t layer, index_t, index_t head) const {
    return held_.positions(layer, now_, head);
  }
  std::vector<index_t> readable(index_t layer, index_t, index_t head) const {
    return held_.readable(layer, now_, head);
  }
  void trace_attended(bool on) { held_.trace_attended(on); }
  std::vector<std::vector<index_t>> attended(index_t layer, index_t) const { return held_.attended(layer, now_); }
  offset_t bytes_read(index_t) const { return held_.bytes_read(now_); }

 private:
  void fork(bool in_prompt) {
    index_t other = held_.fork(now_);
    if (random_.chance(0.5)) std::swap(now_, other);
    if (in_prompt) {
      write(other, random_.pick({1, 5, 20}));
      held_.end_prefill(other);
    }
    step(other);
    others_.push_back(other);
    if (others_.size() < 3) return;
    held_.close(others_.front());
    others_.erase(others_.begin());
  }
  void write(index_t id, index_t tokens) {
    draw(tokens);
    for (index_t layer = 0; layer < layout_shape.layers; ++layer) held_.prefill(layer, id, q_, k_, k_);
  }
  void step(index_t id) {
    draw(1);
    std::vector<float> out(std::size_t(layout_shape.q_heads) * dim);
    for (index_t layer = 0; layer < layout_shape.layers; ++layer)
      held_.decode(layer, {id}, q_, k_, k_, nhd_rows(out.data(), 1, layout_shape.q_heads, dim), {});
  }
  void draw(index_t tokens) {
    numbers_ = support::normals(random_, std::size_t(tokens * layout_shape.q_heads * dim));
    q_ = nhd_rows<const float>(numbers_.data(), tokens, layout_shape.q_heads, dim);
    k_ = nhd_rows<const float>(numbers_.data(), tokens, layout_shape.kv_heads, dim);
  }

  cache_in_layout<Recipe> held_;
  support::rng& random_;
  index_t now_ = -1;
  std::vector<index_t> others_;
  std::vector<float> numbers_;
  rows q_, k_;
};

template <class Recipe>
void as_over_runs() {
  const std::string method = Recipe::name;
  CAPTURE(method);
  support::rng random(301);
  const model_data data(random, layout_shape, 200);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto over_runs = make_cache(chosen, layout_shape, workers);
  forked_conversation<Recipe> over_pages(chosen, workers, random);
  hold_the_same_conversation(over_pages, data, *over_runs, data,
                             [](const auto& got, const auto& expected) { REQUIRE(support::same_bits(got, expected)); });
  CHECK(over_pages.bytes_read(0) == over_runs->bytes_read(0));
}

}  // namespace

TEST_CASE(
    "every method over fixed pages, from fork to fork, keeps, reads and answers as it does over runs, bit for bit") {
  for_every_method<fp32, dim, paged>([]<class Method>() { as_over_runs<Method>(); });
}
