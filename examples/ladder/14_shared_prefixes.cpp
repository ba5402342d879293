// Rung 14: shared prefixes. A document is written once and its prompt is left open. Every question is a fork of it that shares its
// pages; what a method drops it drops from the fork alone, with the question in its window. A tree of such prefixes, with eviction of
// the oldest: examples/engine/prefix/prefix_cache.hpp.
#include <memory>

#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 64, document = 4000, question = 40, questions = 8;
  const ladder::tensors model(document + question, q_heads, heads, dim);
  using method = snapkv<fp32, dim, dim, stored<dense_rows<fp32, dim>, fixed_pages<16>>>;
  method recipe;
  recipe.set_budget(256);
  ladder::checks check;
  cache<method> kv({1, q_heads, heads}, recipe, std::make_shared<cpu::executor>());

  // Another question each time: the same document, tokens of its own behind it.
  const auto ask = [&](index_t id, index_t which) {
    const ladder::tensors own(question, q_heads, heads, dim, unsigned(which + 2));
    kv.prefill(0, id, own.queries(0, question), own.keys(0, question), own.values(0, question));
    kv.end_prefill(id);
    std::vector<float> out(std::size_t(q_heads * dim));
    kv.decode(0, kv.prepare_step({id}, 1), model.queries(document, 1), model.keys(document, 1),
              model.values(document, 1), nhd_rows(out.data(), 1, q_heads, dim));
    return out;
  };
  const auto write_document = [&] {
    const index_t id = kv.open();
    kv.prefill(0, id, model.queries(0, document), model.keys(0, document), model.values(0, document));
    return id;
  };

  // As if there were no other question: the document is written for each.
  std::vector<std::vector<float>> expected;
  for (index_t i = 0; i < questions; ++i) {
    const index_t id = write_document();
    expected.push_back(ask(id, i));
    kv.close(id);
  }

  // The document once, and a fork for each question.
  const index_t prefix = write_document();
  const offset_t whole = kv.bytes(prefix);
  std::vector<index_t> open;
  for (index_t i = 0; i < questions; ++i) open.push_back(kv.fork(prefix));
  offset_t all = kv.bytes(prefix);
  for (const index_t id : open) all += kv.bytes(id);
  const offset_t window = questions * recipe.retain.scorer.window * q_heads * dim * offset_t(sizeof(float));
  check(all <= whole + window + 4096, "of its own a fork has the window of queries, and no page");

  bool is_same = true;
  for (index_t i = 0; i < questions; ++i) is_same &= ask(open[std::size_t(i)], i) == expected[std::size_t(i)];
  check(is_same, "every question is answered with the bits of a sequence alone");
  check(kv.next_position(prefix) == document, "the prefix waits for the next one");

  all = kv.bytes(prefix);
  for (const index_t id : open) all += kv.bytes(id);
  std::printf("%d questions at once: %.2f of the document's %.1f MB\n", int(questions), double(all) / double(whole),
              double(whole) / 1e6);
  check(all < whole + questions * whole * 320 / document, "one whole document, and what each question keeps");
  return check.exit_code();
}
