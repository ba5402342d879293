// Paged retrieval on the GPU reads what it reads on the CPU: the index to the bit, the choice but for rounding.
#include <limits>

#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "support/kv_tensor.hpp"
#include "support/page_oracle.hpp"
#include "tessera/backend/cpu/read/extrema/page_index.hpp"
#include "tessera/backend/cpu/read/extrema/page_scores.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/read/extrema/mean_value.cuh"
#include "tessera/backend/cuda/read/extrema/page_retrieval.cuh"
#include "tessera/scorer/chosen_channels.hpp"
#include "tessera/scorer/hybrid_min_max.hpp"
#include "tessera/scorer/page_min_max.hpp"
#include "tessera/selector/tokens_or_pages.hpp"

using namespace tessera;
using gpu_test::buffer;
using gpu_test::gpu_missing;
using support::oracle::estimate;
namespace oracle = support::oracle;

namespace {

/// Keys, values and queries of a few sequences; `listed`: only candidates of what is stored may be read.
template <class T, int D, bool listed>
struct problem {
  using table_type = std::conditional_t<listed, filtered<ragged>, contiguous>;
  using view_type = kv_view<const T, D, table_type>;
  support::kv_tensor<T, D> kv;
  index_t group, tokens;
  std::vector<T> q;  // [sequences, tokens, q_heads, D]
  std::vector<index_t> first;
  std::vector<float> sinks;  // [q_heads], or empty
  logit_rule rule{};
  std::vector<index_t> lists, lengths;  // candidates by row, kv.slots apart; and what a step may read of each row
  std::vector<offset_t> begins;

  index_t rows() const { return kv.sequences * kv.kv_heads; }
  index_t q_heads() const { return group * kv.kv_heads; }
  index_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

  /// Where the memory of a view is.
  struct pointers {
    const T *k, *v, *q;
    const index_t *positions, *lengths, *lists, *first;
    const offset_t* begins;
    const float* sinks;
  };
  pointers host() const {
    return {kv.k.data(),
            kv.v.data(),
            q.data(),
            kv.positions.empty() ? nullptr : kv.positions.data(),
            lengths.data(),
            lists.data(),
            first.data(),
            begins.data(),
            sinks.empty() ? nullptr : sinks.data()};
  }
  view_type view(const pointers& at, index_t from = 0, index_t count = -1) const {
    view_type view;
    view.sequences = count < 0 ? kv.sequences : count;
    view.kv_heads = kv.kv_heads;
    view.k = at.k;
    view.v = at.v;
    view.lengths = at.lengths + from * kv.kv_heads;
    view.length_strides = {kv.kv_heads, 1};
    if constexpr (listed) {
      view.k_strides = view.v_strides = {0, 0, D, 1};
      view.table = {
          {at.begins + from * kv.kv_heads, kv.kv_heads}, at.lists, at.begins + from * kv.kv_heads, kv.kv_heads};
      view.positions = at.lists;
      view.position_begin = at.begins + from * kv.kv_heads;
    } else {
      const offset_t head = offset_t(kv.slots) * D, sequence = head * kv.kv_heads;
      view.k_strides = view.v_strides = {sequence, head, D, 1};
      view.k += from * sequence;
      view.v += from * sequence;
      if (at.positions) {
        view.position_strides = {offset_t(kv.kv_heads) * kv.slots, kv.slots};
        view.positions = at.positions + from * kv.kv_heads * kv.slots;
      }
    }
    return view;
  }
  rows_view<const T> queries(const pointers& at, index_t from = 0, index_t count = -1) const {
    return nhd_rows<const T>(at.q + offset_t(from) * tokens * q_heads() * D, tokens, q_heads(), D,
                             count < 0 ? kv.sequences : count);
  }
  const T* query(index_t sequence, index_t head, index_t r) const {
    return q.data() + ((offset_t(sequence) * tokens + r / group) * q_heads() + head * group + r % group) * D;
  }

  oracle::page_scores expected(index_t sequence, index_t head, const oracle::page_rules& rules) const {
    const auto all = view(host());
    std::vector<std::vector<float>> floats;
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, heads, positions;
    const auto add = [&](const T* from) { floats.emplace_back(from, from + D); };
    for (index_t r = 0; r < group * tokens; ++r) {
      add(query(sequence, head, r));
      at.push_back(first[std::size_t(sequence)] + r / group);
      heads.push_back(head * group + r % group);
    }
    for (index_t slot = 0; slot < all.length(sequence, head); ++slot) {
      add(all.key(sequence, head, slot));
      positions.push_back(all.position(sequence, head, slot));
    }
    for (std::size_t i = 0; i < floats.size(); ++i)
      (index_t(i) < group * tokens ? queries : keys).push_back(floats[i].data());
    logit_rule host_rule = rule;
    host_rule.sink_logits = sinks.empty() ? nullptr : sinks.data();
    return oracle::score_pages(rules, queries, at, heads, keys, positions, D, host_rule);
  }
};

/// What keys and queries are made of.
enum class kind { normal, repeated, integers, specials };

template <class T, int D, bool listed>
problem<T, D, listed> random_problem(support::rng& random, kind of, index_t longest) {
  const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3);
  std::vector<index_t> lengths;
  for (index_t r = 0; r < sequences * kv_heads; ++r) {
    lengths.push_back(
        random.pick({0, 1, 31, 32, 33, 64, 65, random.between(1, 40), random.between(1, longest), longest}));
  }
  lengths[0] = std::max(lengths[0], 1);
  problem<T, D, listed> made{support::kv_tensor<T, D>(random, sequences, kv_heads, lengths),
                             random.pick({1, 2, 3, 4, 4, 8}),
                             random.pick({1, 1, 1, 2, 5, 8}),
                             {},
                             {},
                             {},
                             {},
                             {},
                             {},
                             {}};
  const index_t count = index_t(made.kv.k.size()) / D;
  if (of == kind::repeated) {
    const auto rows = support::repeated_rows(random, count, D, random.between(1, 4));
    for (std::size_t i = 0; i < rows.size(); ++i) made.kv.k[i] = T(rows[i]);
  }
  if (of == kind::integers) {
    for (auto& x : made.kv.k) x = T(float(random.between(-2, 2)));
  }
  constexpr float odd[] = {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity};
  for (index_t bad = of == kind::specials ? random.between(1, 12) : 0; bad > 0; --bad) {
    const offset_t at = offset_t(random.between(0, count - 1)) * D;
    const index_t from = random.between(0, D - 1), to = random.chance(0.5) ? D : from + 1;
    std::fill(made.kv.k.begin() + at + from, made.kv.k.begin() + at + to, T(odd[random.between(0, 2)]));
  }
  made.kv.remember();
  if (!listed && random.chance(0.4)) made.kv.scatter_positions(random);
  for (const float x : support::normals(random, std::size_t(sequences * made.tokens * made.q_heads() * D),
                                        random.pick({0.3f, 1.0f, 2.0f}))) {
    made.q.push_back(T(of == kind::integers ? float(random.between(-2, 2)) : x));
  }
  if (of == kind::specials && random.chance(0.3)) {
    made.q[std::size_t(random.between(0, index_t(made.q.size()) - 1))] = T(odd[random.between(0, 2)]);
  }
  if (random.chance(0.1)) std::fill(made.q.begin(), made.q.begin() + D, T(0.0f));
  if (random.chance(0.2)) made.sinks = support::normals(random, std::size_t(made.q_heads()), 3);
  if (random.chance(0.2)) made.rule.soft_cap = 5;
  if (random.chance(0.25)) made.rule.sliding_window = random.between(1, 80);
  if (random.chance(0.1)) made.rule.scale = 0.2f;
  made.lists.assign(std::size_t(made.rows() * made.kv.slots), no_index);
  for (index_t row = 0; row < made.rows(); ++row) {
    made.begins.push_back(offset_t(row) * made.kv.slots);
    index_t passed = 0;
    for (index_t slot = 0; slot < lengths[std::size_t(row)]; ++slot) {
      if (random.chance(0.6)) made.lists[std::size_t(row * made.kv.slots + passed++)] = slot;
    }
    made.lengths.push_back(listed ? passed : lengths[std::size_t(row)]);
  }
  for (index_t s = 0; s < sequences; ++s) made.first.push_back(std::max(0, made.kv.newest(s) - made.tokens + 1));
  return made;
}

/// A problem's memory on the device, each sequence's plan, and an index with room to spare.
template <class Problem>
struct on_device;
template <class T, int D, bool listed>
struct on_device<problem<T, D, listed>> {
  using problem_type = problem<T, D, listed>;
  const problem_type& made;
  buffer<T> k, v, q;
  buffer<index_t> positions, lengths, lists, first, rooms;
  buffer<offset_t> begins, index_begins;
  buffer<float> sinks;
  std::vector<index_t> host_rooms;
  std::vector<offset_t> host_begins;
  std::vector<read_plan> host_plans;  // by sequence
  buffer<read_plan> plans;
  buffer<T> extrema{0};
  bool uneven;

  on_device(const problem_type& of, std::vector<read_plan> plans_, bool uneven_)
      : made(of),
        k(of.kv.k),
        v(of.kv.v),
        q(of.q),
        positions(of.kv.positions),
        lengths(of.lengths),
        lists(of.lists),
        first(of.first),
        rooms(std::size_t(of.rows())),
        begins(of.begins),
        index_begins(std::size_t(of.rows())),
        sinks(of.sinks),
        host_plans(std::move(plans_)),
        plans(host_plans),
        uneven(uneven_) {
    offset_t total = 0;
    index_t smallest = host_plans[0].page;
    for (const read_plan& plan : host_plans) smallest = std::min(smallest, plan.page);
    const index_t room = (ceil_div(std::max(1, of.longest()), smallest) + 15) / 8 * 8;
    for (std::size_t row = 0; row < of.lengths.size(); ++row) {
      const index_t page = plan_of(index_t(row)).page;
      host_rooms.push_back(uneven ? (ceil_div(of.lengths[row], page) + 7) / 8 * 8 : room);
      host_begins.push_back(total);
      total += page_row_elements(uneven ? page : 2, D, host_rooms.back());
    }
    rooms.set(host_rooms);
    index_begins.set(host_begins);
    cudaFree(extrema.data);
    extrema.count = std::size_t(total);
    cuda::check(cudaMalloc(&extrema.data, std::max<std::size_t>(1, extrema.count) * sizeof(T)), "cudaMalloc");
    extrema.fill(0x33);
  }
  const read_plan& plan_of(index_t row) const { return host_plans[std::size_t(row / made.kv.kv_heads)]; }
  typename problem_type::pointers at() const {
    return {k.data,
            v.data,
            q.data,
            made.kv.positions.empty() ? nullptr : positions.data,
            lengths.data,
            lists.data,
            first.data,
            begins.data,
            made.sinks.empty() ? nullptr : sinks.data};
  }
  auto view() const { return made.view(at()); }
  page_extrema_view<T, D> index() const {
    if (uneven) return {extrema.data, 1, 0, index_begins.data, rooms.data};
    return {extrema.data, 1, host_rooms[0], nullptr, nullptr};
  }
  logit_rule rule() const {
    logit_rule result = made.rule;
    result.sink_logits = at().sinks;
    return result;
  }

  /// The device's index against one that the CPU builds; pages of one slot against their keys.
  void index_is_the_cpus() const {
    const auto got = extrema.get();
    const page_extrema_view<const T, D> device{got.data(), 1, 0, host_begins.data(), host_rooms.data()};
    bool same = true;
    for (index_t s = 0; s < made.kv.sequences; ++s) {
      const index_t page = host_plans[std::size_t(s)].page;
      const auto view = made.view(made.host(), s, 1);
      for (index_t h = 0; page == 1 && h < made.kv.kv_heads; ++h) {
        for (index_t slot = 0; slot < view.length(0, h); ++slot) {
          for (int d = 0; d < D; ++d)
            same &= view.key(0, h, slot)[d].bits == device.lower(s * made.kv.kv_heads + h, d)[slot].bits;
        }
      }
      if (page == 1) continue;
      cpu::page_index<T, D> index;
      index.reset(made.kv.kv_heads, page);
      index.extend(view);
      for (index_t h = 0; h < made.kv.kv_heads; ++h) {
        const index_t row = s * made.kv.kv_heads + h, pages = ceil_div(made.lengths[std::size_t(row)], page);
        for (int d = 0; d < D; ++d) {
          for (index_t p = 0; p < pages; ++p) {
            same &= index.view().lower(h, d)[p].bits == device.lower(row, d)[p].bits;
            same &= index.view().upper(h, d)[p].bits == device.upper(row, d)[p].bits;
          }
        }
      }
    }
    REQUIRE(same);
  }
};

struct tally {
  index_t rows = 0, open = 0;  // rows compared, and those whose choice rounding decided
  index_t attended = 0;        // launches that also attended
};

bool close(double a, double b, double slack) {
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
      plans.push_back(read_plan::of(scorers.back(), reads.back()));
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

    const offset_t stride = choose.most_chosen() + random.pick({0, 3});
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
        REQUIRE(gpu_test::same_bits(mass.get(), first_mass));
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
      if (round == 1) REQUIRE(gpu_test::same_bits(got.get(), first_got));
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

kind pick_kind(support::rng& random) {
  return random.pick({kind::normal, kind::normal, kind::normal, kind::repeated, kind::integers, kind::specials});
}

template <class T, int D, bool listed>
void compare_hybrid(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto of = pick_kind(random);
    const auto made = random_problem<T, D, listed>(random, of, longest);
    const auto scorer = [&] {
      return hybrid_min_max{random.pick({1, 2, 3, 3, 5, 16, 300}), random.pick({1, 7, 16, 31, 60, D})};
    };
    trial<problem<T, D, listed>, hybrid_min_max>::run(random, made, scorer, estimate::hsa, false, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
  CHECK((seen.attended > 0 || cases < 100 || support::scaled(100) < 100));
  UNSCOPED_INFO("rows " << seen.rows << ", decided by rounding " << seen.open);
}

template <class T, int D, bool listed>
void compare_quest(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto of = pick_kind(random);
    const auto made = random_problem<T, D, listed>(random, of, longest);
    // Sums of small integers are exact in any order: there every tie must be decided alike.
    const auto scorer = [&] { return page_min_max{random.pick({1, 2, 3, 16, 33}), D}; };
    trial<problem<T, D, listed>, page_min_max>::run(random, made, scorer, estimate::quest,
                                                    of == kind::integers && made.rule.soft_cap == 0, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
}

template <class T, int D, bool listed>
void compare_sparq(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto made = random_problem<T, D, listed>(random, pick_kind(random), longest);
    const auto scorer = [&] { return chosen_channels{random.pick({1, 8, 32, D}), random.pick({-1, 0})}; };
    trial<problem<T, D, listed>, chosen_channels>::run(random, made, scorer, estimate::sparq, false, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
}

}  // namespace

TEST_CASE("hybrid sparse attention on the device reads what the CPU reads", "[gpu]") {
  if (gpu_missing()) return;
  compare_hybrid<bf16, 64, false>(301, 500, 200);
  compare_hybrid<fp16, 128, true>(302, 300, 200);
  compare_hybrid<fp16, 128, true>(303, 12, gpu_test::scaled(9'000, 700));
}

TEST_CASE("Quest on the device reads what the CPU reads", "[gpu]") {
  if (gpu_missing()) return;
  compare_quest<bf16, 64, false>(304, 400, 200);
  compare_quest<bf16, 64, false>(305, 10, gpu_test::scaled(9'000, 700));
}

TEST_CASE("SparQ on the device reads what the CPU reads, and knows the mass of it", "[gpu]") {
  if (gpu_missing()) return;
  compare_sparq<bf16, 64, false>(306, 300, 200);
  compare_sparq<fp16, 128, true>(307, 150, 200);
  compare_sparq<bf16, 64, false>(308, 8, gpu_test::scaled(9'000, 700));
}

TEST_CASE("a captured choice follows a cache that grows, and plans that change", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(309);
  auto made = random_problem<bf16, 64, false>(random, kind::normal, 300);
  while (made.tokens != 1 || made.longest() < 300) made = random_problem<bf16, 64, false>(random, kind::normal, 300);
  const auto full = made.lengths;
  std::vector<hybrid_min_max> scorers;
  std::vector<index_t> reads;
  const auto plans = [&] {
    std::vector<read_plan> result;
    for (std::size_t s = 0; s < scorers.size(); ++s) result.push_back(read_plan::of(scorers[s], reads[s]));
    return result;
  };
  for (index_t s = 0; s < made.kv.sequences; ++s) scorers.push_back({3 - s % 3, 20}), reads.push_back(40 - s);
  using made_type = decltype(made);
  using view_type = made_type::view_type;
  on_device<made_type> device(made, plans(), false);
  cuda::read_bounds bounds{300, 50, 1, 3, 0, 0};
  const cuda::choose_pages<view_type, hybrid_min_max> choose(scorers[0], selection_unit::token, bounds,
                                                             made.kv.sequences, made.kv.kv_heads, made.q_heads(), 1,
                                                             cuda::device_info::current());
  const offset_t stride = choose.most_chosen();
  buffer<index_t> out(std::size_t(made.rows() * stride)), counts(std::size_t(made.rows()));
  buffer<unsigned char> workspace(choose.workspace_bytes());
  cuda::page_problem<view_type> p;
  p.view = device.view();
  p.plans = device.plans.data;
  p.index = device.index();
  p.unfolded = 1;
  p.q = made.queries(device.at());
  p.first_position = device.first.data;
  p.rule = device.rule();
  p.out = out.data;
  p.out_stride = stride;
  p.counts = counts.data;
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  {
    gpu_test::graph captured(stream, [&] { choose.run(p, workspace.data, stream); });
    tally seen;
    const index_t steps = gpu_test::scaled(300, 5);
    for (index_t step = 1; step <= steps; ++step) {
      for (std::size_t r = 0; r < full.size(); ++r) made.lengths[r] = std::min(full[r], step);
      device.lengths.set(made.lengths);
      if (step == steps / 2) {  // other counts and channels; other pages would need another index
        for (std::size_t s = 0; s < scorers.size(); ++s) scorers[s].channels = 31 + int(s), reads[s] = 50 - int(s) * 9;
        device.plans.set(plans());
      }
      for (auto& at : made.first)
        at = made.kv.positions.empty() ? step - 1 : made.kv.positions[std::size_t(step - 1)] + 7;
      device.first.set(made.first);
      out.fill(0x77);
      captured.launch();
      agrees_with_the_cpu<made_type, hybrid_min_max, bf16, 64>(made, scorers, estimate::hsa, selection_unit::token,
                                                               reads, out.get(), stride, counts.get(), {}, false, seen);
    }
    device.index_is_the_cpus();
    CHECK(seen.open <= 0.02 * seen.rows + 3);
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("outputs get the mean of V for the mass that they lack", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(310);
  for (index_t i = 0; i < support::scaled(100); ++i) {
    auto made = random_problem<bf16, 64, false>(random, kind::normal, 300);
    for (auto& n : made.lengths) n = std::max(n, made.tokens);
    if (*std::min_element(made.kv.lengths.begin(), made.kv.lengths.end()) < made.tokens) continue;
    if (random.chance(0.3)) made.kv.v[std::size_t(random.between(0, index_t(made.kv.v.size()) - 1))] = bf16(infinity);
    made.kv.remember();
    on_device<decltype(made)> device(made, std::vector<read_plan>(std::size_t(made.kv.sequences)), false);
    using view_type = decltype(made)::view_type;
    const index_t rows = made.rows(), query_rows = made.group * made.tokens;
    std::vector<float> mass, out = support::normals(random, std::size_t(rows * query_rows * 64));
    for (index_t r = 0; r < rows * query_rows; ++r) mass.push_back(random.chance(0.3) ? 1.0f : float(random.uniform()));
    buffer<float> d_mass(mass), d_out(out);
    buffer<double> sums(std::size_t(rows * 64));
    const cuda::mean_value<view_type> mean(rows);
    buffer<unsigned char> workspace(mean.workspace_bytes());
    auto before = made.lengths;
    for (auto& n : before) n -= made.tokens;
    device.lengths.set(before);
    mean.build(device.view(), sums.data, workspace.data, nullptr);
    device.lengths.set(made.lengths);
    cuda::mean_value_problem<view_type> p;
    p.view = device.view();
    p.sums = sums.data;
    p.mass = d_mass.data;
    p.out = nhd_rows(d_out.data, made.tokens, made.q_heads(), 64, made.kv.sequences);
    p.tokens = made.tokens;
    mean.run(p, nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "add_mean_value");
    const auto got = d_out.get();
    const auto got_sums = sums.get();
    for (index_t s = 0; s < made.kv.sequences; ++s) {
      for (index_t h = 0; h < made.kv.kv_heads; ++h) {
        const index_t row = s * made.kv.kv_heads + h, n = made.lengths[std::size_t(row)];
        for (int d = 0; d < 64; ++d) {
          double sum = 0;
          index_t t = 0;
          for (index_t slot = 0; slot < n; ++slot) {
            const float x = made.kv.v_float[made.kv.row(s, h, slot) * 64 + std::size_t(d)];
            sum += std::isfinite(x) ? double(x) : 0.0;
            if (slot < n - made.tokens) continue;
            for (index_t g = 0; g < made.group; ++g) {
              const std::size_t at =
                  std::size_t(((s * made.tokens + t) * made.q_heads() + h * made.group + g) * 64 + d);
              const double a = double(mass[std::size_t(row * query_rows + t * made.group + g)]);
              REQUIRE(double(got[at]) == Approx(a * double(out[at]) + (1 - a) * sum / (slot + 1)).margin(1e-5));
            }
            ++t;
          }
          REQUIRE(got_sums[std::size_t(row * 64 + d)] == Approx(sum).margin(1e-9));
        }
      }
    }
  }
}

TEST_CASE("paged retrieval refuses what it cannot do", "[gpu]") {
  if (gpu_missing()) return;
  using view_type = kv_view<const bf16, 64>;
  const auto device = cuda::device_info::current();
  const auto make = [&](index_t page, index_t read, index_t q_heads, index_t tokens) {
    return cuda::choose_pages<view_type, hybrid_min_max>({}, selection_unit::token, {100, read, page, 3, 0, 0}, 1, 2,
                                                         q_heads, tokens, device);
  };
  REQUIRE_NOTHROW(make(3, 10, 8, 1));
  REQUIRE_THROWS_WITH(make(0, 10, 8, 1), contains("page is 0"));
  REQUIRE_THROWS_WITH(make(4, 10, 8, 1), contains("page is 4"));
  REQUIRE_THROWS_WITH(make(3, 0, 8, 1), contains("read is 0"));
  REQUIRE_THROWS_WITH(make(3, 10, 7, 1), contains("multiple of kv_heads"));
  REQUIRE_THROWS_WITH(make(3, 10, 8, 9), contains("tokens is 9"));
  const auto op = make(2, 10, 8, 1);
  REQUIRE_NOTHROW(op.require_covered(read_plan(10, 2, 64)));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(11, 2, 64)), contains("read 11"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 1, 64)), contains("page 1"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 4, 64)), contains("page 4"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 3, 64, 1)), contains("tail 1"));
  cuda::page_problem<view_type> p;
  p.view.sequences = 1, p.view.kv_heads = 2;
  p.q = nhd_rows<const bf16>(nullptr, 1, 8, 64);
  p.out_stride = 9;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("out_stride is 9"));
  p.out_stride = 10;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("plans of the sequences"));
  const read_plan plan;
  p.plans = &plan;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("data of the page index"));
  p.q.tokens = 2;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("shape of a call"));
  bf16 some{};
  REQUIRE_THROWS_WITH((cuda::index_pages<view_type>{}.fold(p.view, {&some, 1, 0}, &plan, 0, nullptr)),
                      contains("newest is 0"));
  REQUIRE_THROWS_WITH((cuda::index_pages<view_type>{}.fold(p.view, {&some, 1, 0}, nullptr, 1, nullptr)),
                      contains("plans of the sequences"));
}
