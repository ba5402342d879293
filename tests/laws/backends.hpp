// What a cache must keep to, on whatever backend: what tessera::cache and tessera::cuda::cache have in common.
#pragma once

#include "catch.hpp"

#include <vector>

#include <tessera/runtime/turn/basic_cache.hpp>

#include "support/calls/saved_bytes.hpp"
#include "support/random.hpp"

namespace support {

/// Rows of a chunk, or of a step, for every layer: [layers][tokens, heads, dim].
template <class T>
struct chunk_rows {
  std::vector<std::vector<T>> q, k, v;
  index_t tokens = 0;

  chunk_rows(rng& random, const tessera::model_shape& shape, index_t n, int dim) : tokens(n) {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      q.push_back(rows(random, n * shape.q_heads * dim));
      k.push_back(rows(random, n * shape.kv_heads * dim));
      v.push_back(rows(random, n * shape.kv_heads * dim));
    }
  }

  /// One of q, k and v in one layer of a batch, sequence by sequence.
  static std::vector<T> batch(const std::vector<chunk_rows>& sequences, std::vector<std::vector<T>> chunk_rows::* part,
                              index_t layer) {
    std::vector<T> all;
    for (const chunk_rows& sequence : sequences) {
      const std::vector<T>& more = (sequence.*part)[std::size_t(layer)];
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }

 private:
  static std::vector<T> rows(rng& random, tessera::index_t elements) {
    std::vector<T> result;
    for (const float x : normals(random, std::size_t(elements))) result.push_back(T(x));
    return result;
  }
};

/// What can be asked of a sequence.
struct sequence_answers {
  std::vector<std::vector<index_t>> positions, readable;  // by layer and kv_head
  tessera::offset_t bytes = 0;
  index_t next = 0;
  friend bool operator==(const sequence_answers&, const sequence_answers&) = default;
  /// The same tokens; what memory they take hangs on what a pool had free.
  bool same_tokens(const sequence_answers& other) const {
    return positions == other.positions && readable == other.readable && next == other.next;
  }
};

template <class Cache>
sequence_answers answers_of(const Cache& cache, index_t id) {
  sequence_answers result;
  result.bytes = cache.bytes(id);
  result.next = cache.next_position(id);
  for (index_t layer = 0; layer < cache.shape().layers; ++layer) {
    for (index_t head = 0; head < cache.shape().kv_heads; ++head) {
      const auto stored = cache.positions(layer, id, head), readable = cache.readable(layer, id, head);
      result.positions.emplace_back(stored.begin(), stored.end());
      result.readable.emplace_back(readable.begin(), readable.end());
    }
  }
  return result;
}

/// The model of the laws.
inline tessera::model_shape law_shape() { return {2, 4, 2}; }

/// A side makes caches and hands them rows that lie on the host:
///   cache_type, element_type, dim, shape(), tolerance
///   make() -> cache_type                                        empty
///   prefill_layer(cache, id, rows, layer), end_prefill(cache, id)
///   begin(cache, ids, tokens), begin_draft(cache, ids, trees)   a step, or a draft, up to its first layer
///   decode_layer(cache, step, rows of each id, layer) -> vector of float      the outputs, id by id
///   accept(cache, accepted)
///   same(outputs, outputs)                                      to the bit, or what a device's batches leave of it
template <class Side>
struct calls_of_side {
  using cache_type = typename Side::cache_type;
  using rows_type = chunk_rows<typename Side::element_type>;

  Side side;
  rng random;

  rows_type rows(index_t tokens) { return rows_type(random, side.shape(), tokens, Side::dim); }
  void prefill(cache_type& cache, index_t id, const rows_type& chunk) {
    for (index_t layer = 0; layer < side.shape().layers; ++layer) side.prefill_layer(cache, id, chunk, layer);
  }
  index_t prompt(cache_type& cache, const std::vector<rows_type>& chunks) {
    const index_t id = cache.open();
    for (const rows_type& chunk : chunks) prefill(cache, id, chunk);
    side.end_prefill(cache, id);
    return id;
  }
  /// A step, or a draft, in every layer; the sum of their outputs, id by id.
  template <class Step>
  std::vector<float> decode(cache_type& cache, const Step& step, const std::vector<rows_type>& rows) {
    std::vector<float> all;
    for (index_t layer = 0; layer < side.shape().layers; ++layer) {
      const std::vector<float> out = side.decode_layer(cache, step, rows, layer);
      all.resize(out.size());
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += out[i];
    }
    return all;
  }
  std::vector<float> step(cache_type& cache, const std::vector<index_t>& ids, const std::vector<rows_type>& rows) {
    return decode(cache, side.begin(cache, ids, rows[0].tokens), rows);
  }
};

template <class Side>
struct backend_laws : calls_of_side<Side> {
  using base = calls_of_side<Side>;
  using base::side, base::rows, base::prompt, base::prefill, base::step;
  using typename base::cache_type;
  using typename base::rows_type;

  /// A call that is refused changes nothing of any sequence.
  void refused_calls_change_nothing() {
    cache_type cache = side.make();
    const index_t id = prompt(cache, {rows(30), rows(17)});
    const sequence_answers before = answers_of(cache, id);
    const rows_type chunk = rows(3);
    CHECK_THROWS_AS(prefill(cache, id + 1, chunk), tessera::error);
    CHECK_THROWS_AS(side.end_prefill(cache, id), tessera::error);
    CHECK_THROWS_AS(step(cache, {id, id}, {chunk, chunk}), tessera::error);
    CHECK_THROWS_AS(step(cache, {id}, {rows(9)}), tessera::error);
    CHECK_THROWS_AS(cache.close(id + 1), tessera::error);
    CHECK_THROWS_AS(cache.announce(id, 0), tessera::error);
    CHECK(answers_of(cache, id) == before);
    prefill(cache, id, chunk);  // a prompt is under way
    const sequence_answers within = answers_of(cache, id);
    CHECK_THROWS_AS(step(cache, {id}, {rows(1)}), tessera::error);
    CHECK_THROWS_AS(cache.save(id, [](const void*, std::size_t) {}), tessera::error);
    CHECK(answers_of(cache, id) == within);
    side.prefill_layer(cache, id, chunk, 0);  // and a chunk
    const sequence_answers between = answers_of(cache, id);
    CHECK_THROWS_AS(cache.fork(id), tessera::error);
    CHECK(answers_of(cache, id) == between);
  }

  /// A sequence that gets the id of a closed one is as one of a new cache.
  void closed_sequences_leave_nothing() {
    cache_type used = side.make(), unused = side.make();
    const index_t old = prompt(used, {rows(41)});
    step(used, {old}, {rows(1)});
    used.close(old);
    const std::vector<rows_type> chunks{rows(23), rows(20)};
    const rows_type more = rows(2);
    const index_t id = prompt(used, chunks), other = prompt(unused, chunks);
    CHECK(id == old);
    CHECK(answers_of(used, id).same_tokens(answers_of(unused, other)));
    CHECK(step(used, {id}, {more}) == step(unused, {other}, {more}));
    CHECK(answers_of(used, id).same_tokens(answers_of(unused, other)));
  }

  /// What a step does to a sequence hangs on no other sequence of its batch.
  void sequences_of_a_batch_do_not_meet() {
    cache_type together = side.make(), alone = side.make();
    const std::vector<rows_type> first{rows(35)}, second{rows(12), rows(40)};
    const index_t a = prompt(together, first), b = prompt(together, second), c = prompt(alone, second);
    for (int turn = 0; turn < 4; ++turn) {
      const rows_type mine = rows(1), other = rows(1);
      const auto both = step(together, {a, b}, {other, mine}), one = step(alone, {c}, {mine});
      CHECK(side.same(std::vector<float>(both.begin() + long(both.size() / 2), both.end()), one));
    }
    CHECK(answers_of(together, b).same_tokens(answers_of(alone, c)));
  }

  /// A fork answers as its source, goes on as it would, and stays when the source is closed.
  void forks_go_on_as_their_source() {
    cache_type cache = side.make();
    const index_t id = prompt(cache, {rows(44)});
    step(cache, {id}, {rows(1)});
    const index_t copy = cache.fork(id);
    CHECK(answers_of(cache, copy).same_tokens(answers_of(cache, id)));
    for (int turn = 0; turn < 3; ++turn) {
      const rows_type same = rows(1);
      const auto of_source = step(cache, {id}, {same});
      CHECK(step(cache, {copy}, {same}) == of_source);
    }
    const sequence_answers before = answers_of(cache, copy);
    cache.close(id);
    CHECK(answers_of(cache, copy).same_tokens(before));
    prompt(cache, {rows(50)});  // under the source's id
    CHECK(answers_of(cache, copy).same_tokens(before));
  }

  /// A fork in the middle of a prompt goes on with it as its source would, whoever ends it first.
  void forks_go_on_with_a_prompt() {
    cache_type cache = side.make();
    for (const index_t announced : {0, 44 + 9 + 30}) {
      const rows_type first = rows(44), second = rows(9), third = rows(30), one = rows(1), other = rows(30);
      const index_t alone = prompt(cache, {first, second, third});
      const auto expected = step(cache, {alone}, {one});
      const sequence_answers expected_answers = answers_of(cache, alone);
      cache.close(alone);
      const index_t id = cache.open();
      if (announced > 0) cache.announce(id, announced);
      prefill(cache, id, first);
      prefill(cache, id, second);
      const index_t same = cache.fork(id), apart = cache.fork(id);
      CHECK(answers_of(cache, same).same_tokens(answers_of(cache, id)));
      for (const index_t which : {apart, same, id}) {
        prefill(cache, which, which == apart ? other : third);
        side.end_prefill(cache, which);
        const auto out = step(cache, {which}, {one});
        if (which == apart) continue;
        CHECK(out == expected);
        CHECK(answers_of(cache, which).same_tokens(expected_answers));
      }
      for (const index_t which : {same, apart, id}) cache.close(which);
    }
  }

  /// A sequence that was saved and loaded, here or in another cache, answers as its source and goes on as it would.
  /// Bytes that are cut or damaged, and calls between which nothing can be saved, change nothing.
  void saved_sequences_go_on_as_their_source() {
    cache_type cache = side.make(), other = side.make();
    const index_t id = prompt(cache, {rows(44), rows(9)});
    for (int i = 0; i < 3; ++i) step(cache, {id}, {rows(2)});
    const auto bytes = saved(cache, id);
    CHECK(saved(cache, id) == bytes);
    const sequence_answers before = answers_of(cache, id);
    for (const std::size_t length : {std::size_t(0), std::size_t(7), bytes.size() / 2, bytes.size() - 1}) {
      CHECK_THROWS_AS(loaded(other, {bytes.begin(), bytes.begin() + std::ptrdiff_t(length)}), tessera::error);
    }
    auto damaged = bytes;
    damaged[bytes.size() / 2] ^= 1;
    CHECK_THROWS_AS(loaded(cache, damaged), tessera::error);
    CHECK(answers_of(cache, id) == before);
    const index_t copy = loaded(cache, bytes), distant = loaded(other, bytes);
    CHECK(distant == 0);
    CHECK(answers_of(cache, copy).same_tokens(before));
    CHECK(answers_of(other, distant).same_tokens(before));
    for (int turn = 0; turn < 2; ++turn) {
      for (int i = 0; i < 20; ++i) {
        const rows_type same = rows(1);
        const auto of_source = step(cache, {id}, {same});
        CHECK(side.same(step(cache, {copy}, {same}), of_source));
        CHECK(side.same(step(other, {distant}, {same}), of_source));
      }
      CHECK(answers_of(cache, copy).same_tokens(answers_of(cache, id)));
      CHECK(answers_of(other, distant).same_tokens(answers_of(cache, id)));
      const rows_type chunk = rows(21);
      for (auto* held : {&cache, &other}) {
        for (const index_t sequence : {id, copy}) {
          if (held == &other && sequence == copy) continue;
          prefill(*held, sequence, chunk);
          CHECK_THROWS_AS(saved(*held, sequence), tessera::error);
          side.end_prefill(*held, sequence);
        }
      }
    }
  }

  /// Steps that are taken back leave nothing behind, or are refused and stay. A fork can stand at an earlier position.
  void tokens_that_are_taken_back_leave_nothing() {
    cache_type with = side.make(), without = side.make();
    const std::vector<rows_type> chunks{rows(40), rows(21)};
    const index_t detoured = prompt(with, chunks), plain = prompt(without, chunks);
    for (int round = 0; round < 3; ++round) {
      const index_t next = with.next_position(detoured);
      for (int turn = 0; turn < 20; ++turn) step(with, {detoured}, {rows(1)});  // into other pages
      if (with.settled(detoured) > next) {
        const sequence_answers before = answers_of(with, detoured);
        CHECK_THROWS_AS(with.truncate(detoured, next), tessera::error);
        CHECK(answers_of(with, detoured) == before);
        return;
      }
      const index_t earlier = with.fork(detoured, next);
      CHECK(answers_of(with, earlier).same_tokens(answers_of(without, plain)));
      with.truncate(detoured, next);
      CHECK(answers_of(with, detoured).same_tokens(answers_of(without, plain)));
      const rows_type same = rows(1);
      const auto expected = step(without, {plain}, {same});
      CHECK(step(with, {detoured}, {same}) == expected);
      CHECK(step(with, {earlier}, {same}) == expected);
      with.close(earlier);
    }
    CHECK_THROWS_AS(with.truncate(detoured, with.settled(detoured) - 1), tessera::error);
    CHECK_THROWS_AS(with.truncate(detoured, with.next_position(detoured) + 1), tessera::error);
  }

  void hold() {
    refused_calls_change_nothing();
    closed_sequences_leave_nothing();
    sequences_of_a_batch_do_not_meet();
    forks_go_on_as_their_source();
    forks_go_on_with_a_prompt();
    saved_sequences_go_on_as_their_source();
    tokens_that_are_taken_back_leave_nothing();
  }
};

}  // namespace support
