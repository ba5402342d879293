// Eviction in pages that an engine owns: the device chooses, packs, frees, appends and attends as the CPU does, bit for bit
// where nothing is rounded, and nothing outside the tables' pages is written.
#include "backend/cuda/device.hpp"
#include "support/engine_case.hpp"
#include "support/scores.hpp"
#include "tessera/backend/cpu/attend/attend.hpp"
#include "tessera/backend/cpu/choose/score_and_choose.hpp"
#include "tessera/backend/cpu/store/free_pages.hpp"
#include "tessera/backend/cpu/store/pack.hpp"
#include "tessera/backend/cpu/store/virtual_blocks.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/choose/score_and_choose.cuh"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/free_pages.cuh"
#include "tessera/backend/cuda/store/virtual_blocks.cuh"
#include "tessera/budget/adaptive.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/scorer/observation_window.hpp"
#include "tessera/scorer/position.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;
using support::engine_pages;
using support::page_shape;

namespace {

constexpr index_t most_queries = 6, max_tokens = 3;

/// One engine on the host and its copy on the device, through the same calls.
template <class T, int D, class Table, class Policy, int Dv = D>
struct pair_of_engines {
  using pages = engine_pages<T, D, Table, Dv>;
  using view_type = typename pages::view_type;
  static constexpr observes observed = Policy::observed;

  support::rng random;
  page_shape s;
  pages host;
  index_t group, q_heads;
  Policy policy;
  std::vector<index_t> next, freed, counts, device_freed, device_counts;
  buffer<T> pool;
  buffer<index_t> table, indptr, lengths, positions, held, d_freed, d_counts;
  buffer<float> scores;
  cuda::score_and_choose<view_type, Policy> choose;
  cuda::pack<view_type, view_type, true> compact;
  cuda::append<view_type, T> add;
  cuda::decode_attention<view_type> attend;
  buffer<unsigned char> choose_memory, compact_memory, attend_memory;
  cudaStream_t stream{};
  cpu::executor workers{1};

  explicit pair_of_engines(std::uint64_t seed)
      : random(seed),
        s(page_shape::drawn(random)),
        host(s, random),
        group(random.between(1, 8)),
        q_heads(group * s.heads),
        next(std::size_t(s.sequences), 0),
        freed(host.table.size(), -1),
        counts(std::size_t(s.rows()), 0),
        pool(host.pool),
        table(host.table),
        indptr(host.indptr),
        lengths(host.lengths),
        positions(host.positions),
        held(host.held),
        d_freed(freed),
        d_counts(counts),
        scores(host.scores),
        choose(policy, {s.sequences, s.heads, q_heads, most_queries, s.slots()}, cuda::device_info::current()),
        compact(s.sequences, s.heads, s.slots(), cuda::device_info::current()),
        add(s.sequences, s.heads),
        attend(s.sequences, s.heads, q_heads, max_tokens, cuda::device_info::current()),
        choose_memory(choose.workspace_bytes()),
        compact_memory(compact.workspace_bytes()),
        attend_memory(attend.workspace_bytes()) {
    policy.budget.tokens = random.pick({1, 2, 7, 20, 60, 500});
    if constexpr (observed == observes::window) policy.scorer.window = random.between(1, most_queries);
    if constexpr (observed == observes::window) policy.scorer.pool = random.pick({1, 3, 7});
    if constexpr (observed == observes::nothing) policy.scorer.sinks = random.between(0, 4);
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    choose_memory.fill(0xff), compact_memory.fill(0xff), attend_memory.fill(0xff);
    compact.prepare(compact_memory.data, stream);
    attend.prepare(attend_memory.data, stream);
    cuda::check(cudaStreamSynchronize(stream), "prepare");
  }
  ~pair_of_engines() { cudaStreamDestroy(stream); }

  support::page_pointers<T> there() const {
    return {pool.data, table.data, indptr.data, lengths.data, positions.data, scores.data};
  }
  std::vector<T> rows(std::size_t count) {
    std::vector<T> values;
    for (const float x : support::normals(random, count)) values.push_back(T(x));
    return values;
  }
  void compare_stored() {
    REQUIRE(same_bits(pool.get(), host.pool));
    REQUIRE(lengths.get() == host.lengths);
    REQUIRE(positions.get() == host.positions);
    REQUIRE(same_bits(scores.get(), host.scores));
    REQUIRE(held.get() == host.held);
    REQUIRE(table.get() == host.table);
  }
  void compare() {
    compare_stored();
    REQUIRE(host.outside_is_untouched());
  }

  std::vector<index_t> append(index_t most) {
    std::vector<index_t> added;
    for (index_t b = 0; b < s.sequences; ++b) {
      added.push_back(std::min(host.room(b), random.chance(0.2) ? random.between(0, 1) : random.between(0, most)));
      host.make_room(b, added.back());
    }
    table.set(host.table), held.set(host.held);
    const index_t tokens = std::max(1, *std::max_element(added.begin(), added.end()));
    const buffer<index_t> d_added(added), d_next(next);
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const auto k = rows(std::size_t(s.sequences * tokens * s.heads * D));
      const auto v = rows(std::size_t(s.sequences * tokens * s.heads * Dv));
      const buffer<T> d_k(k), d_v(v);
      const auto problem = [&](const auto& p, const T* new_k, const T* new_v, const index_t* new_tokens,
                               const index_t* first) {
        append_problem<view_type, T> a;
        a.view = host.view(layer, p);
        a.k = nhd_rows(new_k, tokens, s.heads, D, s.sequences);
        a.v = nhd_rows(new_v, tokens, s.heads, Dv, s.sequences);
        a.lengths = p.lengths + layer * s.sequences * s.heads;
        a.new_tokens = new_tokens;
        a.first_position = first;
        a.positions = host.position_column(layer, p);
        a.scores = host.score_column(layer, p);
        a.pool = host.facts();
        return a;
      };
      add.run(problem(there(), d_k.data, d_v.data, d_added.data, d_next.data), nullptr, stream);
      cuda::check(cudaStreamSynchronize(stream), "append");
      cpu::append(problem(host.here(), k.data(), v.data(), added.data(), next.data()));
    }
    for (index_t b = 0; b < s.sequences; ++b) next[std::size_t(b)] += added[std::size_t(b)];
    return added;
  }

  /// The scores of a head by definition, in double, from what the host stores.
  std::vector<double> window_scores(index_t layer, index_t b, index_t h, const std::vector<T>& q, index_t valid) {
    const auto view = host.view(layer, host.here());
    std::vector<std::vector<float>> keys;
    std::vector<const float*> at;
    std::vector<index_t> where;
    for (index_t i = 0; i < view.length(b, h); ++i) {
      keys.emplace_back();
      for (int d = 0; d < D; ++d) keys.back().push_back(float(view.key(b, h, i)[d]));
      where.push_back(view.position(b, h, i));
    }
    for (const auto& key : keys) at.push_back(key.data());
    std::vector<double> sums(keys.size(), 0.0);
    for (index_t t = 0; t < valid; ++t) {
      for (index_t g = 0; g < group; ++g) {
        std::vector<float> query;
        for (int d = 0; d < D; ++d) {
          query.push_back(
              float(q[(std::size_t((b * most_queries + t) * q_heads + h * group + g)) * D + std::size_t(d)]));
        }
        const auto row = support::oracle::attend(query.data(), next[std::size_t(b)] - valid + t, at, {}, where, D, 0);
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += row.probabilities[i];
      }
    }
    const auto candidates = offset_t(sums.size()) - std::min<offset_t>(valid, offset_t(sums.size()));
    if constexpr (observed == observes::window) {
      const auto pooled =
          support::oracle::max_pool(std::vector<double>(sums.begin(), sums.begin() + candidates), policy.scorer.pool);
      std::copy(pooled.begin(), pooled.end(), sums.begin());
    }
    return sums;
  }

  void evict(const std::vector<index_t>& added) {
    std::vector<index_t> valid, first, budgets, tails;
    for (index_t b = 0; b < s.sequences; ++b) {
      valid.push_back(0);
      if constexpr (observed == observes::window) valid.back() = std::min(policy.scorer.window, added[std::size_t(b)]);
      first.push_back(next[std::size_t(b)] - valid.back());
      budgets.push_back(random.between(1, 40));
      tails.push_back(observed == observes::window ? valid.back() : policy.scorer.protected_tail(budgets.back()));
    }
    const bool by_sequence = random.chance(0.5);
    const buffer<index_t> d_valid(valid), d_first(first), d_budgets(budgets), d_tails(tails);
    if constexpr (observed == observes::every_query) {
      host.scores = support::tied_scores(random, index_t(host.scores.size()), random.pick({1, 3, 50}));
      scores.set(host.scores);
    }
    const auto room = random.pick({0, 0, 1, 9});
    for (index_t layer = 0; layer < s.layers; ++layer) {
      const auto q = rows(std::size_t(s.sequences * most_queries * q_heads * D));
      const buffer<T> d_q(q);
      const auto problem = [&](const auto& p, const T* queries, const index_t* valid_, const index_t* first_,
                               const index_t* budgets_, const index_t* tails_) {
        choose_problem<view_type, T> c;
        c.view = host.view(layer, p);
        c.layer = layer, c.layers = s.layers;
        if constexpr (observed == observes::window) {
          c.q = nhd_rows(queries, most_queries, q_heads, D, s.sequences);
          c.valid = valid_;
        }
        c.first_position = first_;
        const auto column = host.score_column(layer, p);
        c.scores = {column.data, column.sequence_stride, column.head_stride, nullptr};
        if (by_sequence) c.budgets = budgets_, c.tails = tails_;
        c.pool = host.facts();
        return c;
      };
      const auto packing = [&](const auto& p, const auto& from, const selection_view& chosen) {
        pack_problem<view_type, view_type> k{from.view, chosen, from.view};
        k.positions = host.position_column(layer, p);
        k.source_scores = from.scores;
        k.scores = host.score_column(layer, p);
        k.lengths = p.lengths + layer * s.sequences * s.heads;
        k.pool = host.facts();
        return k;
      };
      // Recorded: nothing is allocated and nobody waits. The last layer's record frees pages too.
      const auto on_device = problem(there(), d_q.data, d_valid.data, d_first.data, d_budgets.data, d_tails.data);
      selection_view chosen;
      graph(stream, [&] {
        chosen = choose.run(policy, on_device, choose_memory.data, stream);
        compact.run(packing(there(), on_device, chosen), compact_memory.data, stream);
        if (layer == s.layers - 1) {
          cuda::free_pages(host.freeing(there(), held.data, d_freed.data, d_counts.data, room), stream);
        }
      }).launch();

      const auto on_host = problem(host.here(), q.data(), valid.data(), first.data(), budgets.data(), tails.data());
      selection expected;
      cpu::choose_workspace<D> workspace;
      cpu::score_and_choose(policy, on_host, expected, workspace, workers);
      const index_t rows = s.sequences * s.heads;
      std::vector<index_t> count(static_cast<std::size_t>(rows)), slots(std::size_t(rows) * std::size_t(s.slots()));
      cuda::check(cudaMemcpy(count.data(), chosen.counts, count.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
      cuda::check(cudaMemcpy(slots.data(), chosen.indices, slots.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
      REQUIRE(chosen.row_stride == s.slots());
      REQUIRE(count == expected.counts);
      for (index_t row = 0; row < rows; ++row) {
        const index_t* got = slots.data() + offset_t(row) * s.slots();
        const std::vector<index_t> kept(got, got + count[std::size_t(row)]);
        if constexpr (observed == observes::window) {
          const index_t b = row / s.heads, tail = valid[std::size_t(b)];
          REQUIRE(support::may_be_chosen(window_scores(layer, b, row % s.heads, q, tail), tail, kept, 2e-3));
        } else {
          REQUIRE(kept ==
                  std::vector<index_t>(expected.row(row), expected.row(row) + expected.counts[std::size_t(row)]));
        }
      }
      cpu::pack(packing(host.here(), on_host, {slots.data(), count.data(), nullptr, s.slots()}), workers);
    }
    cpu::free_pages(host.freeing(host.here(), host.held.data(), freed.data(), counts.data(), room));
    REQUIRE(d_counts.get() == counts);
    const auto got = d_freed.get();
    for (index_t row = 0; row < s.rows(); ++row) {
      const auto begin = offset_t(row) * s.max_blocks;
      REQUIRE(std::equal(got.begin() + begin, got.begin() + begin + counts[std::size_t(row)], freed.begin() + begin));
    }
    compare_stored();  // pages that were freed still hold what they held
    host.take_back(freed, counts);
    REQUIRE(host.outside_is_untouched());
    pool.set(host.pool), table.set(host.table);
  }

  void compare_virtual_blocks(index_t layer) {
    if (D != Dv && !s.split && !s.own_tables) return;  // heads of K and of V are cut differently
    const index_t width = s.max_blocks + random.between(0, 2);
    std::vector<index_t> expected(std::size_t(s.sequences * s.heads * width));
    buffer<index_t> got(expected.size());
    cpu::virtual_blocks(host.view(layer, host.here()), width, expected.data(), host.facts());
    cuda::virtual_blocks(host.view(layer, there()), width, got.data, stream, host.facts());
    cuda::check(cudaStreamSynchronize(stream), "virtual_blocks");
    REQUIRE(got.get() == expected);
  }

  void decode(index_t tokens) {
    std::vector<index_t> first;
    for (const index_t position : next) first.push_back(std::max(0, position - tokens));
    const buffer<index_t> d_first(first);
    for (index_t layer = 0; layer < s.layers; ++layer) {
      compare_virtual_blocks(layer);
      const auto q = rows(std::size_t(s.sequences * tokens * q_heads * D));
      const buffer<T> d_q(q);
      buffer<float> out(std::size_t(s.sequences * tokens * q_heads * Dv));
      out.fill(0xff);
      cuda::decode_problem<view_type> p{};
      p.view = host.view(layer, there());
      p.q = nhd_rows<const T>(d_q.data, tokens, q_heads, D, s.sequences);
      p.first_position = d_first.data;
      p.out = nhd_rows(out.data, tokens, q_heads, Dv, s.sequences);
      attend.run(p, attend_memory.data, stream);
      cuda::check(cudaStreamSynchronize(stream), "decode attention");
      std::vector<float> expected(out.count);
      cpu::decode_workspace workspace;
      cpu::decode_attention(host.view(layer, host.here()),
                            cpu::query_rows<T>{nhd_rows(q.data(), tokens, q_heads, D, s.sequences), first.data()},
                            logit_rule{}, nullptr, {nhd_rows(expected.data(), tokens, q_heads, Dv, s.sequences), {}},
                            workspace, workers);
      const auto got = out.get();
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        difference += std::pow(double(got[i]) - double(expected[i]), 2), size += std::pow(double(expected[i]), 2);
      }
      REQUIRE(std::sqrt(difference) <= 5e-3 * std::sqrt(size));
    }
  }

  void run() {
    CAPTURE(s.sequences, s.heads, s.page, s.max_blocks, s.hnd, s.own_tables, s.split, group, policy.budget.tokens);
    for (int turn = 0; turn < shrunk(3, 1); ++turn) {
      const auto added = append(turn == 0 ? 150 : 40);
      compare();
      evict(added);
      for (int step = 0; step < 2; ++step) {
        append(random.between(1, 3));
        compare();
        decode(random.between(1, max_tokens));
      }
    }
  }
};

template <class T, int D, class Table, class Scorer, class Budget, int Dv = D>
void converse(std::uint64_t seed) {
  for (int i = 0; i < gpu_test::scaled(20, 4); ++i) {
    CAPTURE(i);
    pair_of_engines<T, D, Table, retain<Scorer, Budget, top_tokens>, Dv>(seed * 1000 + std::uint64_t(i)).run();
  }
}

}  // namespace

TEST_CASE("an engine on the device evicts twice in its own pages as one on the host: a window of queries", "[gpu]") {
  if (gpu_missing()) return;
  converse<bf16, 64, block_table, observation_window, uniform>(1);
  converse<fp16, 128, csr_table, observation_window, uniform, 80>(2);
}

TEST_CASE("an engine on the device evicts twice in its own pages as one on the host: accumulated scores", "[gpu]") {
  if (gpu_missing()) return;
  converse<bf16, 128, block_table, accumulated_attention, adaptive>(3);
  converse<fp16, 64, csr_table, accumulated_attention, uniform>(4);
}

TEST_CASE("an engine on the device evicts twice in its own pages as one on the host: positions", "[gpu]") {
  if (gpu_missing()) return;
  converse<bf16, 64, block_table, position, uniform>(5);
}
