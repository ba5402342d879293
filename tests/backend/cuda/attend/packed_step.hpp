// A step over packed rows on the GPU, and the same in double over what is stored.
#pragma once

#include "backend/cuda/store/packed_case.hpp"
#include "catch.hpp"
#include "tessera/backend/cuda/attend/packed/unpacked_attention.cuh"
#include "tessera/backend/cuda/read/means/decode_blocks.cuh"

namespace gpu_test {

/// A batch, its queries, and what a step of them is asked.
template <class T, int D, int Dv = D>
struct packed_step {
  packed_batch<T, D, Dv> batch;
  index_t tokens, group;
  cuda::device_info device = cuda::device_info::current();
  logit_rule rule;
  std::vector<T> q;
  buffer<T> d_q;
  std::vector<index_t> first;
  buffer<index_t> d_first;

  packed_step(index_t heads, const std::vector<segment_plan>& plans, const std::vector<index_t>& counts,
              const std::vector<index_t>& tails, index_t tokens_, index_t group_)
      : batch(index_t(counts.size()), heads, plans, counts, tails),
        tokens(tokens_),
        group(group_),
        q(normal<T>(counts.size() * std::size_t(tokens * heads * group) * D, 0.6f)),
        d_q(q),
        d_first(counts.size()) {
    // The step's own tokens are the last whole rows.
    for (index_t b = 0; b < batch.sequences(); ++b) {
      first.push_back(batch.packed(b) + tails[std::size_t(b)] - tokens);
    }
    d_first.set(first);
  }
  rows_view<const T> queries() const {
    return nhd_rows<const T>(d_q.data, tokens, batch.heads() * group, D, batch.sequences());
  }
  const T* query(index_t b, index_t head, index_t row) const {
    const index_t q_heads = batch.heads() * group;
    return q.data() + ((offset_t(b) * tokens + row / group) * q_heads + head * group + row % group) * D;
  }
  index_t most_blocks() const {
    index_t most = 0;
    for (index_t s = 0; s < batch.view().max_segments; ++s) most += ceil_div(batch.plan(s).rows, batch.plan(s).block);
    return most;
  }

  /// The largest error of a row's output, relative to its length, and of its log-sum-exp. `lists` [lanes] of units, or nothing: all.
  template <class Out, class Tile = T>
  void check_attention(const std::vector<std::vector<index_t>>& lists, index_t unit, double tolerance) {
    using view_type = typename packed_batch<T, D, Dv>::view_type;
    const index_t heads = batch.heads(), q_heads = heads * group, sequences = batch.sequences();
    const std::size_t out_rows = std::size_t(sequences * tokens * q_heads);
    const auto [k, v, block, alike] = limits();
    const cuda::rotate_queries<view_type> rotate(sequences, heads, q_heads, tokens, batch.view().max_segments);
    const cuda::attend_packed<view_type, Out, Tile> attend(sequences, heads, q_heads, tokens, batch.view().max_segments,
                                                           k, v, device);
    buffer<unsigned char> rotating(rotate.workspace_bytes()), attending(attend.workspace_bytes());
    buffer<Out> out(out_rows * Dv);
    buffer<float> lse(out_rows);
    std::vector<index_t> all, counts;
    std::size_t longest = 1;
    for (const auto& list : lists) longest = std::max(longest, list.size());
    for (const auto& list : lists) {
      counts.push_back(index_t(list.size()));
      all.insert(all.end(), list.begin(), list.end());
      all.resize(all.size() + longest - list.size(), no_index);
    }
    buffer<index_t> d_lists(all), d_counts(counts);
    cuda::packed_problem<view_type, Out> problem{batch.view(),
                                                 queries(),
                                                 d_first.data,
                                                 rule,
                                                 nhd_rows(out.data, tokens, q_heads, Dv, sequences),
                                                 nhd_rows(lse.data, tokens, q_heads, 1, sequences),
                                                 {},
                                                 unit};
    if (!lists.empty()) problem.chosen = {d_lists.data, d_counts.data, nullptr, offset_t(longest)};
    cudaStream_t stream;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    for (auto* work : {&rotating, &attending}) work->fill(0xff);
    out.fill(0xff), lse.fill(0xff);
    graph step(stream, [&] {
      const auto rotated = rotate.run(problem.view, problem.q, rotating.data, attend.part_segments(attending.data),
                                      attend.parts(), stream);
      attend.run(problem, rotated, attending.data, stream);
    });
    step.launch();
    const auto got = out.get();
    const auto got_lse = lse.get();
    out.fill(0xff);
    step.launch();
    if (got.size() > 0 && step.ready) CHECK(same_bits(got, out.get()));
    cudaStreamDestroy(stream);
    compare(got, got_lse, lists, unit, tolerance);
  }

  /// The same of all rows, by pieces that are turned back.
  void check_prompt(index_t piece, index_t slice, double tolerance) {
    using view_type = typename packed_batch<T, D, Dv>::view_type;
    const index_t q_heads = batch.heads() * group;
    REQUIRE(batch.sequences() == 1);
    const cuda::unpacked_attention<typename view_type::whole_type, float> attend({1, q_heads, batch.heads()}, 4096,
                                                                                 device, piece, slice);
    buffer<float> out(std::size_t(tokens * q_heads) * Dv), lse(std::size_t(tokens * q_heads));
    out.fill(0xff), lse.fill(0xff);
    cuda::prefill_problem<view_type, float> problem{batch.view(),
                                                    queries(),
                                                    d_first.data,
                                                    rule,
                                                    nhd_rows(out.data, tokens, q_heads, Dv),
                                                    nhd_rows(lse.data, tokens, q_heads, 1)};
    problem.view.packed = batch.packed(0);
    attend.run(problem, nullptr);
    compare(out.get(), lse.get(), {}, 1, tolerance);
  }

  /// Outputs [sequences, tokens, q_heads, Dv] and log-sum-exps against attention in double over what is stored.
  template <class Out>
  void compare(const std::vector<Out>& got, const std::vector<float>& got_lse,
               const std::vector<std::vector<index_t>>& lists, index_t unit, double tolerance) const {
    const index_t heads = batch.heads(), q_heads = heads * group, sequences = batch.sequences();
    const std::vector<float> sinks =
        rule.sink_logits ? cuda::downloaded(rule.sink_logits, std::size_t(q_heads)) : std::vector<float>{};
    double worst = 0, worst_lse = 0;
    for (index_t b = 0; b < sequences; ++b) {
      for (index_t h = 0; h < heads; ++h) {
        const std::vector<index_t> slots =
            slots_of(b, lists.empty() ? nullptr : &lists[std::size_t(b * heads + h)], unit);
        std::vector<numbers> keys, values;
        for (const index_t slot : slots)
          keys.push_back(batch.key(b, h, slot)), values.push_back(batch.value(b, h, slot));
        for (index_t row = 0; row < tokens * group; ++row) {
          const index_t at = first[std::size_t(b)] + row / group, q_head = h * group + row % group;
          const double sink = sinks.empty() ? -1e300 : double(sinks[std::size_t(q_head)]);
          numbers logits, right(static_cast<std::size_t>(Dv), 0.0);
          double top = sink, total = 0, seen = 0;
          for (std::size_t i = 0; i < slots.size(); ++i) {
            double x = 0;
            for (int d = 0; d < D; ++d) x += keys[i][std::size_t(d)] * double(float(query(b, h, row)[d]));
            x *= double(rule.scale_for(D));
            if (rule.soft_cap > 0) x = rule.soft_cap * std::tanh(x / rule.soft_cap);
            logits.push_back(rule.visible(at, slots[i]) ? x : -1e300);
            top = std::max(top, logits.back());
          }
          for (std::size_t i = 0; i < slots.size(); ++i) {
            const double p = logits[i] <= -1e299 ? 0.0 : std::exp(logits[i] - top);
            total += p, seen += p;
            for (int d = 0; d < Dv; ++d) right[std::size_t(d)] += p * values[i][std::size_t(d)];
          }
          if (!sinks.empty()) total += std::exp(sink - top);
          double difference = 0, size = 1e-12;
          const std::size_t line = std::size_t((offset_t(b) * tokens + row / group) * q_heads + q_head);
          for (int d = 0; d < Dv; ++d) {
            const double x = total > 0 ? right[std::size_t(d)] / total : 0.0;
            difference += std::pow(double(float(got[line * Dv + std::size_t(d)])) - x, 2), size += x * x;
          }
          if (!(difference >= 0)) difference = 1e18;  // NaN
          if (seen > 0) worst = std::max(worst, std::sqrt(difference / size));
          if (seen == 0 && difference != 0) worst = 1e9;
          if (total > 0)
            worst_lse = std::max(worst_lse, std::abs(double(got_lse[line]) - (top + std::log(total))));
          else if (got_lse[line] != -infinity)
            worst_lse = 1e9;
          if (!(worst_lse < 1e9)) worst_lse = 1e9;
        }
      }
    }
    INFO("dims " << D << " " << Dv << " tokens " << tokens << " group " << group << " unit " << unit << " chosen "
                 << !lists.empty());
    CHECK(worst < tolerance);
    CHECK(worst_lse < 1e-3);
  }

  /// Units of 0 rows are the segment's blocks.
  index_t rows_of_unit(index_t s, index_t unit) const { return unit > 0 ? unit : batch.plan(s).block; }
  std::vector<index_t> slots_of(index_t b, const std::vector<index_t>* list, index_t unit) const {
    std::vector<index_t> slots;
    index_t first_unit = 0, begin = 0;
    for (index_t s = 0; s < batch.segments(b); ++s) {
      const index_t rows = batch.plan(s).rows, each = rows_of_unit(s, unit), units = ceil_div(rows, each);
      for (index_t u = 0; u < units; ++u) {
        if (list && !std::binary_search(list->begin(), list->end(), first_unit + u)) continue;
        for (index_t i = u * each; i < std::min(rows, (u + 1) * each); ++i) slots.push_back(begin + i);
      }
      first_unit += units, begin += rows;
    }
    for (index_t i = 0; i < batch.tails().lengths[std::size_t(b)]; ++i) slots.push_back(begin + i);
    return slots;
  }
  /// Some units of every (sequence, kv_head), ascending; none of the first one's.
  std::vector<std::vector<index_t>> random_units(index_t unit, int percent) const {
    std::vector<std::vector<index_t>> lists;
    for (index_t lane = 0; lane < batch.sequences() * batch.heads(); ++lane) {
      lists.emplace_back();
      index_t units = 0;
      for (index_t s = 0; s < batch.segments(lane / batch.heads()); ++s)
        units += ceil_div(batch.plan(s).rows, rows_of_unit(s, unit));
      for (index_t u = 0; lane > 0 && u < units; ++u) {
        if (draw(0, 99) < percent) lists.back().push_back(u);
      }
    }
    return lists;
  }

  cuda::segment_limits limits() const {
    cuda::segment_limits made{batch.plan(0).k, batch.plan(0).v, batch.plan(0).block};
    for (index_t s = 0; s < batch.view().max_segments; ++s) {
      const segment_plan& plan = batch.plan(s);
      widen(made.k, plan.k), widen(made.v, plan.v);
      made.alike = made.alike && plan.block == batch.plan(0).block;
      made.least_block = std::min(made.least_block, plan.block);
    }
    return made;
  }

  static void widen(packed_format& to, const packed_format& by) {
    const index_t channels = std::max(to.channels, by.channels);
    if (by.value_bytes() > to.value_bytes()) to = by;
    to.channels = channels;
  }

  /// The whole step: which blocks it chooses, and what it writes. Budgets are in tokens; `block`: of every segment, or 0.
  void check_decoding(index_t block, index_t budget) {
    using view_type = typename packed_batch<T, D, Dv>::view_type;
    const index_t heads = batch.heads(), q_heads = heads * group, sequences = batch.sequences();
    const index_t most = batch.view().max_segments;
    index_t capacity = 0;
    for (index_t s = 0; s < most; ++s) capacity += batch.plan(s).rows;
    auto known = limits();
    known.alike = block > 0;
    const cuda::decode_blocks<view_type, float> decode(block_mean{}, whole_blocks{block > 0 ? block : 8}, budget,
                                                       sequences, heads, q_heads, tokens, capacity, most, known,
                                                       device);
    const std::size_t out_rows = std::size_t(sequences * tokens * q_heads);
    buffer<unsigned char> work(decode.workspace_bytes());
    buffer<float> out(out_rows * Dv), lse(out_rows);
    work.fill(0xff), out.fill(0xff), lse.fill(0xff);
    cuda::packed_problem<view_type, float> problem{batch.view(),
                                                   queries(),
                                                   d_first.data,
                                                   rule,
                                                   nhd_rows(out.data, tokens, q_heads, Dv, sequences),
                                                   nhd_rows(lse.data, tokens, q_heads, 1, sequences),
                                                   {},
                                                   1};
    cudaStream_t stream;
    cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    graph step(stream, [&] { decode.run(problem, work.data, stream); });
    step.launch();
    const auto got = out.get(), got_lse = lse.get();
    decode.choose(problem, work.data, stream);
    cuda::check(cudaStreamSynchronize(stream), "choosing");
    cudaStreamDestroy(stream);
    CHECK(problem.unit == block);
    std::vector<std::vector<index_t>> lists;
    for (index_t lane = 0; lane < sequences * heads; ++lane) {
      index_t blocks = 0;
      for (index_t s = 0; s < batch.segments(lane / heads); ++s)
        blocks += ceil_div(batch.plan(s).rows, batch.plan(s).block);
      const index_t count = cuda::downloaded(problem.chosen.counts + lane, 1)[0];
      if (block > 0) CHECK(count == std::min(blocks, ceil_div(budget, block)));
      lists.push_back(cuda::downloaded(problem.chosen.row(lane), std::size_t(count)));
      CHECK(std::is_sorted(lists.back().begin(), lists.back().end()));
      if (count == 0) continue;
      CHECK(lists.back().front() == 0);
      CHECK(lists.back().back() == blocks - 1);
      check_best(lane, lists.back(), budget, block == 0);
    }
    compare(got, got_lse, lists, block, 1.2e-2);
  }
  /// No block between the first and the last that was left scores better than one that was chosen, and no more were than the budget asks
  /// for. `trimmed`: nor fewer; else the budget is a number of blocks, of which a segment's last one may be short.
  void check_best(index_t lane, const std::vector<index_t>& chosen, index_t budget, bool trimmed) const {
    const index_t b = lane / batch.heads(), h = lane % batch.heads();
    numbers scores;
    std::vector<index_t> sizes;
    double size = 0;
    for (index_t s = 0; s < batch.segments(b); ++s) {
      numbers sum(std::size_t(batch.plan(s).k.channels), 0.0);
      for (index_t row = 0; row < tokens * group; ++row) {
        const numbers one = turned(query(b, h, row), batch.k_basis(b, s, h), batch.plan(s).k.channels, D);
        for (std::size_t c = 0; c < one.size(); ++c) sum[c] += one[c];
      }
      for (index_t block = 0; block < ceil_div(batch.plan(s).rows, batch.plan(s).block); ++block) {
        const numbers mean = batch.mean(b, s, h, block).values;
        sizes.push_back(std::min(batch.plan(s).block, batch.plan(s).rows - block * batch.plan(s).block));
        scores.push_back(std::inner_product(sum.begin(), sum.end(), mean.begin(), 0.0));
        size = std::max(size, std::abs(scores.back()));
      }
    }
    double least = 1e300, most = -1e300;
    for (index_t i = 1; i + 1 < index_t(scores.size()); ++i) {
      if (std::binary_search(chosen.begin(), chosen.end(), i))
        least = std::min(least, scores[std::size_t(i)]);
      else
        most = std::max(most, scores[std::size_t(i)]);
    }
    CHECK(most <= least + 1e-5 * size);
    index_t held = 0,
            best = sizes.front() + (sizes.size() > 1 ? sizes.back() : 0);  // rows; and those that surely belong
    for (const index_t i : chosen) {
      held += sizes[std::size_t(i)];
      const bool inside = i > 0 && i + 1 < index_t(scores.size());
      if (inside && scores[std::size_t(i)] > least + 1e-5 * size) best += sizes[std::size_t(i)];
    }
    if (trimmed) CHECK(held >= std::min(budget, batch.packed(b)));
    if (chosen.size() > 2) CHECK(best < budget);
  }

  void check_scores(row_reduction reduce) {
    using view_type = typename packed_batch<T, D, Dv>::view_type;
    const index_t heads = batch.heads(), sequences = batch.sequences(), capacity = most_blocks() + 3;
    const cuda::rotate_queries<view_type> rotate(sequences, heads, heads * group, tokens, batch.view().max_segments);
    const cuda::score_blocks<view_type> score(most_blocks(), batch.view().max_segments);
    buffer<unsigned char> rotating(rotate.workspace_bytes());
    buffer<float> scores(std::size_t(sequences * heads) * std::size_t(capacity));
    buffer<index_t> units(std::size_t(sequences) * std::size_t(heads));
    rotating.fill(0xff), scores.fill(0xff), units.fill(0xff);
    const auto rotated = rotate.run(batch.view(), queries(), rotating.data, nullptr, 0, nullptr);
    score.run(batch.view(), rotated, block_mean{reduce}, scores.data, capacity, units.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "scores");
    const auto got = scores.get();
    const auto got_units = units.get();
    double worst = 0;
    int wrong = 0;
    for (index_t lane = 0; lane < sequences * heads; ++lane) {
      const index_t b = lane / heads, h = lane % heads;
      numbers right;
      double size = 1e-12;
      for (index_t s = 0; s < batch.segments(b); ++s) {
        std::vector<numbers> rows;
        for (index_t row = 0; row < tokens * group; ++row) {
          numbers one = turned(query(b, h, row), batch.k_basis(b, s, h), batch.plan(s).k.channels, D);
          if (row == 0 || reduce == row_reduction::max) {
            rows.push_back(one);
          } else {
            for (std::size_t c = 0; c < one.size(); ++c) rows[0][c] += one[c];
          }
        }
        for (index_t block = 0; block < ceil_div(batch.plan(s).rows, batch.plan(s).block); ++block) {
          const numbers mean = batch.mean(b, s, h, block).values;
          double best = -1e300;
          for (const numbers& row : rows) {
            double x = 0;
            for (std::size_t c = 0; c < row.size(); ++c) x += row[c] * mean[c];
            best = std::max(best, x);
          }
          right.push_back(best), size = std::max(size, std::abs(best));
        }
      }
      wrong += got_units[std::size_t(lane)] != index_t(right.size());
      for (std::size_t i = 0; i < right.size(); ++i) {
        const float x = got[std::size_t(lane) * std::size_t(capacity) + i];
        if (i == 0 || i + 1 == right.size()) {
          wrong += x != infinity;
        } else {
          const double error = std::abs(double(x) - right[i]) / size;
          worst = std::max(worst, error >= 0 ? error : 1e9);
        }
      }
    }
    CHECK(wrong == 0);
    CHECK(worst < 1e-5);
  }
};

}  // namespace gpu_test
