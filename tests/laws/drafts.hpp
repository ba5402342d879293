// What a cache must keep to with drafts and cancelled calls, on whatever backend.
#pragma once

#include <cmath>

#include "laws/backends.hpp"

namespace support {

/// The laws of `prepare_draft`, `accept` and `cancel`.
template <class Side>
struct draft_laws : calls_of_side<Side> {
  using base = calls_of_side<Side>;
  using base::side, base::random, base::rows, base::prompt, base::prefill, base::step, base::decode;
  using typename base::cache_type;
  using typename base::rows_type;
  using recipe_type = std::decay_t<decltype(std::declval<cache_type>().recipe())>;
  /// Whether steps read everything that is stored, and drop nothing.
  static constexpr bool reads_all =
      !recipe_type::retrieve_type::retrieves && !tessera::fires_in_steps<typename recipe_type::schedule_type>;

  /// Branches that are at most `longest` tokens long.
  std::vector<index_t> some_parents(index_t tokens, index_t longest) {
    std::vector<index_t> parents, depths;
    for (index_t t = 0; t < tokens; ++t) {
      index_t parent = random.between(-1, t - 1);
      while (parent >= 0 && depths[std::size_t(parent)] + 1 >= longest) parent = parents[std::size_t(parent)];
      parents.push_back(parent);
      depths.push_back(parent < 0 ? 0 : depths[std::size_t(parent)] + 1);
    }
    return parents;
  }
  static tessera::draft_tree tree_of(const std::vector<index_t>& parents) {
    return tessera::draft_tree(tessera::host_vector<index_t>(parents.begin(), parents.end()));
  }
  static std::vector<index_t> path(const std::vector<index_t>& parents, index_t node) {
    std::vector<index_t> nodes;
    for (; node >= 0; node = parents[std::size_t(node)]) nodes.insert(nodes.begin(), node);
    return nodes;
  }
  /// Some tokens of a draft, as rows of their own.
  static rows_type part(const rows_type& all, const std::vector<index_t>& nodes) {
    rows_type some = all;
    some.tokens = index_t(nodes.size());
    for (auto* planes : {&some.q, &some.k, &some.v}) {
      for (auto& plane : *planes) {
        const std::size_t row = plane.size() / std::size_t(all.tokens);
        std::vector<typename Side::element_type> kept;
        for (const index_t node : nodes)
          kept.insert(kept.end(), plane.begin() + long(row) * node, plane.begin() + long(row) * (node + 1));
        plane = kept;
      }
    }
    return some;
  }
  static std::vector<float> row_of(const std::vector<float>& out, index_t token, index_t tokens) {
    const std::size_t row = out.size() / std::size_t(tokens);
    return std::vector<float>(out.begin() + long(row) * token, out.begin() + long(row) * (token + 1));
  }
  static double difference(const std::vector<float>& a, const std::vector<float>& b) {
    double off = 0, size = 1e-30;
    for (std::size_t i = 0; i < a.size(); ++i) {
      off += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
      size += double(b[i]) * b[i];
    }
    return a.size() == b.size() ? std::sqrt(off / size) : 1;
  }

  /// A token of a tree gets what it would get at the end of its branch, taken token by token.
  void tokens_see_their_branch() {
    if (!reads_all) return;
    cache_type cache = side.make();
    const index_t id = prompt(cache, {rows(40), rows(9)});
    const index_t tokens = 17;
    const std::vector<index_t> parents = some_parents(tokens, 6);
    const rows_type drafted = rows(tokens);
    const auto draft = side.begin_draft(cache, {id}, {tree_of(parents)});
    const std::vector<float> got = decode(cache, draft, {drafted});
    cache.cancel(id);
    for (index_t node = 0; node < tokens; ++node) {
      const index_t copy = cache.fork(id);
      std::vector<float> expected;
      for (const index_t before : path(parents, node)) expected = step(cache, {copy}, {part(drafted, {before})});
      CHECK(difference(row_of(got, node, tokens), expected) < Side::tolerance);
      cache.close(copy);
    }
  }

  /// Accepted tokens are as a step of them; the others leave nothing.
  void accepted_tokens_are_a_step() {
    cache_type drafting = side.make(), plain = side.make();
    const std::vector<rows_type> chunks{rows(30), rows(25)};
    const index_t id = prompt(drafting, chunks), other = prompt(plain, chunks);
    for (int round = 0; round < 6; ++round) {
      const index_t tokens = random.between(1, 12);
      const std::vector<index_t> parents = some_parents(tokens, 5),
                                 nodes = path(parents, random.between(-1, tokens - 1));
      const rows_type drafted = rows(tokens);
      decode(drafting, side.begin_draft(drafting, {id}, {tree_of(parents)}), {drafted});
      side.accept(drafting, {{id, tessera::host_vector<index_t>(nodes.begin(), nodes.end())}});
      if (!nodes.empty()) step(plain, {other}, {part(drafted, nodes)});
      CHECK(answers_of(drafting, id).same_tokens(answers_of(plain, other)));
      const rows_type more = rows(1);
      CHECK(step(drafting, {id}, {more}) == step(plain, {other}, {more}));
    }
  }

  /// While a draft is pending nothing else changes its sequence, and what is no path is refused.
  void pending_drafts_are_alone() {
    cache_type cache = side.make();
    const index_t id = prompt(cache, {rows(30)});
    const sequence_answers before = answers_of(cache, id);
    CHECK_THROWS_AS(side.accept(cache, {{id, {0}}}), tessera::error);
    CHECK_THROWS_AS(side.begin_draft(cache, {id, id}, {tree_of({-1})}), tessera::error);
    CHECK_THROWS_AS(side.begin_draft(cache, {id}, {tessera::draft_tree::chain(9)}), tessera::error);
    CHECK_THROWS_AS(tree_of({0}), tessera::error);
    CHECK_THROWS_AS(tree_of(std::vector<index_t>(65, -1)), tessera::error);
    const auto draft = side.begin_draft(cache, {id}, {tree_of({-1, 0, 0, 1})});
    const rows_type drafted = rows(4);
    side.decode_layer(cache, draft, {drafted}, 0);
    CHECK_THROWS_AS(side.accept(cache, {{id, {0}}}), tessera::error);  // layer 1 has not had it
    side.decode_layer(cache, draft, {drafted}, 1);
    CHECK_THROWS_AS(side.begin_draft(cache, {id}, {tree_of({-1})}), tessera::error);
    CHECK_THROWS_AS(prefill(cache, id, rows(3)), tessera::error);
    CHECK_THROWS_AS(step(cache, {id}, {rows(1)}), tessera::error);
    CHECK_THROWS_AS(cache.announce(id, 4), tessera::error);
    CHECK_THROWS_AS(cache.fork(id), tessera::error);
    CHECK_THROWS_AS(cache.truncate(id, cache.next_position(id)), tessera::error);
    using nodes = tessera::host_vector<index_t>;
    for (const nodes& wrong : {nodes{1}, nodes{0, 3}, nodes{0, 0}, nodes{0, 1, 2}, nodes{4}, nodes{-1}})
      CHECK_THROWS_AS(side.accept(cache, {{id, wrong}}), tessera::error);
    CHECK_THROWS_AS(side.accept(cache, {{id, {0}}, {id, {0}}}), tessera::error);
    cache.cancel(id);
    CHECK(answers_of(cache, id) == before);
    CHECK_THROWS_AS(cache.cancel(id), tessera::error);
    CHECK_THROWS_AS(side.decode_layer(cache, draft, {drafted}, 0), tessera::error);
  }

  /// Drafts of a batch are accepted apart, and a smaller tree's missing tokens have no effect.
  void drafts_of_a_batch_do_not_meet() {
    cache_type together = side.make(), alone = side.make();
    const std::vector<rows_type> first{rows(31)}, second{rows(44)};
    const index_t a = prompt(together, first), b = prompt(together, second), c = prompt(alone, second);
    const std::vector<index_t> large = some_parents(7, 4), small = some_parents(3, 3);
    const rows_type of_a = rows(7), of_b = rows(7);
    const auto both =
        decode(together, side.begin_draft(together, {a, b}, {tree_of(large), tree_of(small)}), {of_a, of_b});
    const auto one = decode(alone, side.begin_draft(alone, {c}, {tree_of(small)}), {part(of_b, {0, 1, 2})});
    for (index_t t = 0; t < 3; ++t) {
      const std::vector<float> of_second(both.begin() + long(both.size() / 2), both.end());
      CHECK(side.same(row_of(of_second, t, 7), row_of(one, t, 3)));
    }
    side.accept(together, {{b, {0}}});
    side.accept(alone, {{c, {0}}});
    CHECK(answers_of(together, b).same_tokens(answers_of(alone, c)));
    side.accept(together, {{a, {0}}});
    CHECK(together.next_position(a) == 32);
  }

  /// A step that is cancelled for one sequence goes on for the other, and leaves nothing of the first.
  void cancelled_steps_leave_nothing() {
    cache_type cancelling = side.make(), plain = side.make();
    const std::vector<rows_type> first{rows(30)}, second{rows(41)};
    const index_t a = prompt(cancelling, first), b = prompt(cancelling, second);
    prompt(plain, first), prompt(plain, second);  // with the same ids
    CHECK_THROWS_AS(cancelling.cancel(a), tessera::error);
    const rows_type of_a = rows(2), of_b = rows(2);
    const auto now = side.begin(cancelling, {a, b}, 2);
    const auto expected = side.begin(plain, {a, b}, 2);
    std::vector<float> got = side.decode_layer(cancelling, now, {of_a, of_b}, 0);
    CHECK(got == side.decode_layer(plain, expected, {of_a, of_b}, 0));
    bool is_cancelled = true;
    try {
      cancelling.cancel(a);
    } catch (const tessera::error&) {
      is_cancelled = false;
    }
    CHECK(is_cancelled == (tessera::taken_back<recipe_type>() != tessera::takes_back::nothing));
    if (is_cancelled) CHECK_THROWS_AS(step(cancelling, {a}, {rows(1)}), tessera::error);
    got = side.decode_layer(cancelling, now, {of_a, of_b}, 1);
    CHECK(got == side.decode_layer(plain, expected, {of_a, of_b}, 1));
    CHECK(answers_of(cancelling, b).same_tokens(answers_of(plain, b)));
    if (!is_cancelled) return;
    plain.truncate(a, 30);
    CHECK(answers_of(cancelling, a).same_tokens(answers_of(plain, a)));
    const rows_type more = rows(1);
    CHECK(step(cancelling, {a, b}, {more, more}) == step(plain, {a, b}, {more, more}));
    // All sequences: at once.
    const sequence_answers before = answers_of(cancelling, a), other = answers_of(cancelling, b);
    const auto dropped = side.begin(cancelling, {a, b}, 2);
    side.decode_layer(cancelling, dropped, {of_a, of_b}, 0);
    cancelling.cancel(b);
    cancelling.cancel(a);
    CHECK(answers_of(cancelling, a).same_tokens(before));
    CHECK(answers_of(cancelling, b).same_tokens(other));
    CHECK_THROWS_AS(side.decode_layer(cancelling, dropped, {of_a, of_b}, 1), tessera::error);
    CHECK(step(cancelling, {a, b}, {more, more}) == step(plain, {a, b}, {more, more}));
    // One is cancelled, the other is closed.
    side.decode_layer(cancelling, side.begin(cancelling, {a, b}, 2), {of_a, of_b}, 0);
    cancelling.cancel(a);
    cancelling.close(b);
    CHECK(step(cancelling, {a}, {more}).size() == more.q[0].size());
    CHECK(cancelling.next_position(a) == 33);
  }

  /// A chunk that some layers have is taken back, or refused and finished.
  void cancelled_chunks_leave_nothing() {
    cache_type cancelling = side.make(), plain = side.make();
    const index_t a = cancelling.open(), b = plain.open();
    side.prefill_layer(cancelling, a, rows(12), 0);
    if (cancelling.settled(a) > 0) {  // what the prompt reads lasts
      CHECK_THROWS_AS(cancelling.cancel(a), tessera::error);
      return;
    }
    cancelling.cancel(a);
    CHECK(cancelling.next_position(a) == 0);
    const rows_type first = rows(20), second = rows(13);
    prefill(cancelling, a, first), prefill(plain, b, first);
    CHECK_THROWS_AS(cancelling.cancel(a), tessera::error);  // every layer has it
    side.prefill_layer(cancelling, a, second, 0);
    try {
      cancelling.cancel(a);
      CHECK(cancelling.next_position(a) == 20);
      prefill(cancelling, a, second);
    } catch (const tessera::error&) {
      side.prefill_layer(cancelling, a, second, 1);
    }
    prefill(plain, b, second);
    side.end_prefill(cancelling, a), side.end_prefill(plain, b);
    CHECK(answers_of(cancelling, a).same_tokens(answers_of(plain, b)));
    const rows_type more = rows(1);
    CHECK(step(cancelling, {a}, {more}) == step(plain, {b}, {more}));
  }

  void hold() {
    tokens_see_their_branch();
    accepted_tokens_are_a_step();
    pending_drafts_are_alone();
    drafts_of_a_batch_do_not_meet();
    cancelled_steps_leave_nothing();
    cancelled_chunks_leave_nothing();
  }
};

}  // namespace support
