// One problem of paged retrieval: what the device chooses against what the CPU chooses.
#pragma once
#include "backend/cuda/read/page_problem.cuh"
#include "catch.hpp"

namespace gpu_test {

struct tally {
  index_t rows = 0, open = 0;  // rows compared, and those whose choice rounding decided
  index_t attended = 0;        // launches that also attended
};

inline bool close(double a, double b, double slack) {
  return a != b && std::abs(a - b) <= 1e-4 * std::max(std::abs(a), std::abs(b)) + slack;
}

/// One choice of all rows on the device against the CPU's, each sequence with its own scorer and count; where they differ,
/// the oracle must find the scores of what changed places equal but for rounding.
template <class Problem, class Scorer, class T, int D>
void agrees_with_the_cpu(const Problem& made, const std::vector<Scorer>& scorers, estimate of, selection_unit unit,
                         const std::vector<index_t>& reads, const std::vector<index_t>& got, offset_t stride,
                         const std::vector<index_t>& counts, const std::vector<float>& mass, bool exact, tally& seen) {
  const index_t query_rows = made.group * made.tokens;
  logit_rule rule = made.rule;
  rule.sink_logits = made.host().sinks;
  for (index_t s = 0; s < made.kv.sequences; ++s) {
    const auto view = made.view(made.host(), s, 1);
    const Scorer& scorer = scorers[std::size_t(s)];
    const index_t read = reads[std::size_t(s)];
    const index_t tail = std::max(made.tokens > 1 ? made.tokens : 0, scorer.protected_tail(read));
    cpu::page_index<T, D> index;
    index.reset(made.kv.kv_heads, scorer.page);
    index.extend(view);
    const cpu::query_rows<T> queries{made.queries(made.host(), s, 1), made.first.data() + s};
    for (index_t h = 0; h < made.kv.kv_heads; ++h) {
      const index_t row = s * made.kv.kv_heads + h, n = made.lengths[std::size_t(row)];
      std::vector<index_t> want(std::size_t(n) + 1);
      std::vector<float> want_mass(static_cast<std::size_t>(query_rows));
      cpu::page_workspace<D> memory;
      const auto choice =
          cpu::choose_by_pages(view, 0, h, index.view(), queries, rule, scorer, tokens_or_pages{unit, scorer.page},
                               tail, read, want.data(), want_mass.data(), memory);
      want.resize(std::size_t(choice.count));
      INFO("row " << row << " n " << n << " page " << scorer.page << " channels " << scorer.channels << " group "
                  << made.group << " tokens " << made.tokens << " read " << read << " tail " << tail << " unit "
                  << int(unit) << " of " << int(of) << " window " << made.rule.sliding_window);
      const auto begin = got.begin() + row * stride;
      const index_t count = counts[std::size_t(row)];
      REQUIRE((count >= 0 && count <= stride));
      const std::vector<index_t> chosen(begin, begin + count);
      REQUIRE(std::all_of(begin + count, begin + stride, [](index_t x) { return x == 0x77777777; }));
      bool ascending = true;
      for (std::size_t i = 1; i < chosen.size(); ++i) ascending &= chosen[i] > chosen[i - 1];
      REQUIRE(ascending);
      ++seen.rows;
      if (chosen == want) {
        for (index_t r = 0; r < query_rows && !mass.empty(); ++r) {
          REQUIRE(mass[std::size_t(row * query_rows + r)] == Approx(want_mass[std::size_t(r)]).margin(2e-4));
        }
        continue;
      }
      ++seen.open;
      REQUIRE_FALSE(exact);
      const auto scores = made.expected(s, h, {of, scorer.page, scorer.channels});
      if (scores.ambiguous) continue;
      std::vector<index_t> lost, won;
      std::set_difference(want.begin(), want.end(), chosen.begin(), chosen.end(), std::back_inserter(lost));
      std::set_difference(chosen.begin(), chosen.end(), want.begin(), want.end(), std::back_inserter(won));
      const auto best = [&](const std::vector<index_t>& slots) {
        double top = -oracle::infinite;
        for (const index_t slot : slots) top = std::max(top, oracle::ranked(scores.scores[std::size_t(slot)]));
        return top;
      };
      UNSCOPED_INFO("lost " << lost.size() << ": " << best(lost) << ", won " << won.size() << ": " << best(won));
      REQUIRE(close(best(lost), best(won), scores.slack));
    }
  }
}

/// Runs a random problem: builds the index of what was there before the step, lets the step's tokens join it (by its own
/// launch or on the way), and chooses, twice.
template <class Problem, class Scorer>
struct trial;
template <class T, int D, bool listed, class Scorer>
struct trial<problem<T, D, listed>, Scorer> {
  /// `made_scorer()`: one for each sequence, fitted.
  template <class MakeScorer>
  static void run(support::rng& random, const problem<T, D, listed>& made, const MakeScorer& made_scorer, estimate of,
                  bool exact, tally& seen) {
    using view_type = typename problem<T, D, listed>::view_type;
    const index_t longest = std::max(1, made.longest());
    const auto unit = random.pick({selection_unit::token, selection_unit::page});
    // Capacity beyond what is there, and objects made for more than one step has.
    cuda::read_bounds bounds;
    bounds.capacity = random.pick({longest, longest, longest * 3 + 5, 300'000});
    std::vector<Scorer> scorers;
    std::vector<index_t> reads;
    std::vector<read_plan> plans;
    const bool alike = random.chance(0.3);
    for (index_t s = 0; s < made.kv.sequences; ++s) {
      if (s == 0 || !alike) {
        scorers.push_back(made_scorer());
        reads.push_back(
            random.pick({random.between(1, longest), random.between(1, std::max(1, longest / 8)), longest}));
      } else {
        scorers.push_back(scorers.back());
        reads.push_back(reads.back());
      }
      plans.push_back(read_plan::fitted_to(scorers.back(), reads.back()));
      bounds.cover(plans.back(), bounds.capacity);
    }
    bounds.usual_pages = random.pick({0, bounds.usual_pages, ceil_div(longest, bounds.page), random.between(1, 60)});
    on_device<problem<T, D, listed>> device(made, plans, random.chance(0.3));
    const index_t tokens = bounds.capacity < 300'000 ? random.pick({made.tokens, 8}) : made.tokens;
    auto info = cuda::device_info::current();
    // A block alone, clusters of two blocks, four and as many as there can be, with few rows.
    info.multiprocessors = random.pick({info.multiprocessors, 1, 2 * made.rows(), 4 * made.rows()});
    const cuda::choose_pages<view_type, Scorer, float> choose(scorers[0], unit, bounds, made.kv.sequences,
                                                              made.kv.kv_heads, made.q_heads(), tokens, info);
    const cuda::index_pages<view_type> pages;
    const index_t joined = random.pick({made.tokens, 1, 0, 8});
    auto before = made.lengths;
    for (auto& n : before) n = std::max(0, n - joined);
    device.lengths.set(before);
    pages.build(device.view(), device.index(), device.plans.data, ceil_div(longest, bounds.page), nullptr);
    device.lengths.set(made.lengths);
    const bool fold = random.chance(0.5);
    if (fold && joined > 0) pages.fold(device.view(), device.index(), device.plans.data, joined, nullptr);

    const offset_t stride = choose.max_chosen() + random.pick({0, 3});
    buffer<index_t> out(std::size_t(made.rows() * stride)), counts(std::size_t(made.rows()));
    buffer<float> mass(std::size_t(made.rows() * made.group * made.tokens));
    buffer<unsigned char> workspace(choose.workspace_bytes());
    workspace.fill(0xff);
    cuda::page_problem<view_type> p;
    p.view = device.view();
    p.plans = device.plans.data;
    p.index = device.index();
    p.unfolded = fold ? 0 : joined;
    p.q = made.queries(device.at());
    p.first_position = device.first.data;
    p.rule = device.rule();
    p.out = out.data;
    p.out_stride = stride;
    p.counts = counts.data;
    const bool weighed = Scorer::normalised && random.chance(0.7);
    p.mass = weighed ? mass.data : nullptr;
    std::vector<index_t> first_out;
    std::vector<float> first_mass;
    const bool apart = random.chance(0.4);  // in two launches, as devices without clusters and long rows do it
    for (int round = 0; round < 2; ++round) {
      out.fill(0x77), counts.fill(0x77), mass.fill(0x77);
      if (apart) {
        choose.score(p, workspace.data, nullptr);
        choose.select(p, workspace.data, nullptr);
      } else {
        choose.run(p, workspace.data, nullptr);
      }
      cuda::check(cudaDeviceSynchronize(), "choose_pages");
      if (round == 1) {
        REQUIRE(out.get() == first_out);
        REQUIRE(same_bits(mass.get(), first_mass));
      }
      first_out = out.get(), first_mass = mass.get();
    }
    device.index_is_the_cpus();
    agrees_with_the_cpu<problem<T, D, listed>, Scorer, T, D>(made, scorers, of, unit, reads, first_out, stride,
                                                             counts.get(), weighed ? first_mass : std::vector<float>{},
                                                             exact, seen);
    if (choose.attends()) attends(choose, p, out, counts, workspace, first_out, info, seen);
  }

  /// The launch that also attends chooses the same and gives what decode attention makes of it, twice alike.
  template <class Choose, class Problem>
  static void attends(const Choose& choose, Problem p, buffer<index_t>& out, buffer<index_t>& counts,
                      buffer<unsigned char>& workspace, const std::vector<index_t>& first_out,
                      const cuda::device_info& info, tally& seen) {
    using view_type = typename problem<T, D, listed>::view_type;
    ++seen.attended;
    const index_t sequences = p.q.sequences, tokens = p.q.tokens, q_heads = p.q.heads;
    const cuda::decode_attention<view_type> attend(sequences, p.view.kv_heads, q_heads, tokens, info);
    buffer<unsigned char> attending(attend.workspace_bytes());
    const std::size_t rows = std::size_t(sequences * tokens * q_heads);
    buffer<float> want(rows * D), got(rows * D), want_lse(rows), got_lse(rows);
    const auto rows_of = [&](buffer<float>& of) { return nhd_rows(of.data, tokens, q_heads, D, sequences); };
    const auto lse_of = [&](buffer<float>& of) { return nhd_rows(of.data, tokens, q_heads, 1, sequences); };
    attend.prepare(attending.data, nullptr);
    attend.run({p.view,
                p.q,
                p.first_position,
                p.rule,
                rows_of(want),
                lse_of(want_lse),
                {p.out, p.counts, nullptr, p.out_stride}},
               attending.data, nullptr);
    std::vector<float> first_got;
    const int rounds = support::scaled(100) < 10 ? 1 : 2;  // a sanitizer takes seconds for a cluster's launch
    for (int round = 0; round < rounds; ++round) {
      out.fill(0x77), counts.fill(0x77), workspace.fill(0xff), got.fill(0x77), got_lse.fill(0x77);
      choose.choose_and_attend(p, rows_of(got), lse_of(got_lse), workspace.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "choose_and_attend");
      REQUIRE(out.get() == first_out);
      if (round == 1) REQUIRE(same_bits(got.get(), first_got));
      first_got = got.get();
    }
    const auto compare = [&](const std::vector<float>& a, const std::vector<float>& b, float slack) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i] || (a[i] != a[i] && b[i] != b[i])) continue;
        INFO("element " << i << " of " << a.size() << ": " << a[i] << " and " << b[i]);
        REQUIRE(std::abs(a[i] - b[i]) <= slack * (1 + std::abs(a[i])));
      }
    };
    compare(want.get(), first_got, 0.02f);  // two roundings of probabilities to 16 bits
    compare(want_lse.get(), got_lse.get(), 1e-3f);
  }
};

}  // namespace gpu_test
