// Calls of the operations with random arguments, valid and not: a refused one writes nothing, another does what it says.
#include "catch.hpp"

#include <cstdlib>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/attend/merge.hpp>
#include <tessera/backend/cpu/choose/retain.hpp>
#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/backend/cpu/read/extrema/page_scores.hpp>
#include <tessera/backend/cpu/score/score.hpp>
#include <tessera/backend/cpu/store/pack.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/oracle.hpp"
#include "support/small_batch.hpp"

using namespace tessera;
namespace oracle = support::oracle;

namespace {

using support::must;
using support::operation_call;
using support::small_batch;
constexpr int dim = small_batch::dim;
constexpr index_t room = small_batch::room, most_tokens_of_q = small_batch::most_tokens_of_q;

/// Calls in an ordinary run; TESSERA_RANDOM_CALLS asks for another number.
index_t calls_in_all() {
  const char* wanted = std::getenv("TESSERA_RANDOM_CALLS");
  return wanted ? std::max(1, std::atoi(wanted)) : support::scaled(20000);
}

/// Calls over the stored rows of a small batch.
class operations : public small_batch {
 public:
  using small_batch::small_batch;

  static constexpr const char* names[] = {"prefill_attention", "decode_attention", "decode_attention",
                                          "score_rows",        "append",           "pack",
                                          "merge_parts",       "choices"};

  void call(const operation_call& now) {
    random_ = support::rng(now.seed);
    rule_ = {};
    rule_.soft_cap = random_.chance(0.2) ? 5.0f : 0.0f;
    rule_.sliding_window = random_.chance(0.3) ? random_.between(1, 30) : 0;
    rule_.sink_logits = random_.chance(0.3) ? sinks_.data() : nullptr;
    switch (now.operation) {
      case 0:
        return attend(false);
      case 1:
      case 2:
        return attend(true);
      case 3:
        return score();
      case 4:
        return append();
      case 5:
        return pack();
      case 6:
        return merge();
      default:
        return random_.chance(0.5) ? choose() : choose_pages();
    }
  }

 private:
  void attend(bool step) {
    bool right = true;
    const index_t tokens = random_.between(0, step ? 4 : most_tokens_of_q);
    const auto q = queries(tokens, right);
    std::vector<float> out(std::size_t(sequences_ * 10 * 8 * dim), 3.0f), lse(4 * 10 * 8, 7.0f);
    auto out_rows = nhd_rows(out.data(), tokens, q_heads(), dim, sequences_);
    auto lse_rows = nhd_rows(lse.data(), tokens, q_heads(), 1, sequences_);
    bool shaped = true;
    spoil(out_rows, shaped);
    if (!shaped) lse_rows = {};
    const bool part = random_.chance(0.3), wanted = shaped && (part || random_.chance(0.6));
    if (!wanted) lse_rows = {};
    right = right && shaped && (!part || wanted);
    const selection chosen = some_slots();
    const selection_view read = chosen.view();
    const bool selects = step && random_.chance(0.5);
    const query_rows<float> asked{q, first_.data()};
    const auto made = [&] {
      const cpu::attention_output to{out_rows, lse_rows};
      if (step && part)
        return decode_attention_part(view(), asked, rule_, selects ? &read : nullptr, to, decode_, one_);
      if (step) return decode_attention(view(), asked, rule_, selects ? &read : nullptr, to, decode_, one_);
      if (part) return prefill_attention_part(view(), asked, rule_, to, one_);
      prefill_attention(view(), asked, rule_, to, one_);
    };
    if (refused("attention", right, {&out, &lse}, made) || tokens == 0) return;
    const index_t b = random_.between(0, sequences_ - 1), t = random_.between(0, tokens - 1),
                  h = random_.between(0, q_heads() - 1), row = b * kv_heads_ + h / group_;
    std::vector<index_t> positions;
    std::vector<const float*> keys, values;
    for (index_t i = 0; i < (selects ? read.count(row) : lengths_[std::size_t(row)]); ++i) {
      const std::size_t at = std::size_t(begins_[std::size_t(row)] + (selects ? read.row(row)[i] : i));
      positions.push_back(positions_[at]);
      keys.push_back(k_.data() + at * dim);
      values.push_back(v_.data() + at * dim);
    }
    logit_rule rule = rule_;
    if (part) rule.sink_logits = nullptr;
    const auto want =
        oracle::attend(q.row(b, t, h), first_[std::size_t(b)] + t, keys, values, positions, dim, dim, rule, h);
    const double error = support::row_error(out_rows.row(b, t, h), want.out);
    must(error < 2e-5, "attention is the oracle's", "sequence ", b, ", token ", t, ", head ", h, ": error ", error);
    if (!lse_rows.data) return;
    const float lse_of_row = *lse_rows.row(b, t, h);
    must(support::number_error(lse_of_row, want.lse) < 1e-5, "a log-sum-exp is the oracle's", "sequence ", b,
         ", token ", t, ", head ", h, ": ", lse_of_row, ", of the oracle ", want.lse);
  }

  void score() {
    bool right = true;
    const index_t tokens = random_.between(0, most_tokens_of_q);
    const auto q = queries(tokens, right);
    std::vector<float> scores(std::size_t(rows() * room), 1.0f);
    const query_rows<float> asked{q, first_.data()};
    if (refused("score_rows", right, {&scores}, [&] {
          score_rows(view(), asked, rule_, observation_window{}, scores.data(), begins_.data(), scoring_, one_);
        }))
      return;
    // Each query row that sees something gives away 1, the sink's share aside.
    for (index_t row = 0; row < rows() && !rule_.sink_logits; ++row) {
      double given = 0, expected = 0;
      for (index_t slot = 0; slot < room; ++slot) given += scores[std::size_t(begins_[std::size_t(row)] + slot)] - 1.0;
      for (index_t t = 0; t < tokens; ++t) {
        bool sees = false;
        for (index_t slot = 0; slot < lengths_[std::size_t(row)]; ++slot) {
          sees |= rule_.visible(first_[std::size_t(row / kv_heads_)] + t,
                                positions_[std::size_t(begins_[std::size_t(row)] + slot)]);
        }
        expected += sees ? group_ : 0;
      }
      must(support::number_error(given, expected) < 1e-4, "a query gives away 1", "row ", row, ": ", given, " of ",
           expected);
    }
  }

  void append() {
    bool right = true;
    const index_t tokens = random_.between(0, room - 20);
    auto k = nhd_rows<const float>(inputs_.data(), tokens, kv_heads_, dim, sequences_), v = k;
    v.data += dim;
    spoil(random_.chance(0.5) ? k : v, right);
    std::vector<float> keys = k_, values = v_;
    if (refused("append", right, {&keys, &values}, [&] { cpu::append(view(keys, values), k, v); })) return;
    for (index_t row = 0; row < rows(); ++row) {
      for (index_t slot = 0; slot < room; ++slot) {
        const std::size_t at = std::size_t(begins_[std::size_t(row)] + slot) * dim;
        const index_t t = slot - lengths_[std::size_t(row)];
        const bool fresh = t >= 0 && t < tokens;
        const float* want = fresh ? k.row(row / kv_heads_, t, row % kv_heads_) : k_.data() + at;
        const bool same_key = std::equal(want, want + dim, keys.data() + at);
        const float* value = fresh ? v.row(row / kv_heads_, t, row % kv_heads_) : v_.data() + at;
        must(same_key && std::equal(value, value + dim, values.data() + at),
             "append writes the new rows and leaves the others", "row ", row, ", slot ", slot);
      }
    }
  }

  void pack() {
    const selection chosen = some_slots();
    std::vector<float> keys = k_, values = v_;
    view_type to = view(keys, values);
    const bool right = !random_.chance(0.1);
    if (!right) (random_.chance(0.5) ? to.sequences : to.kv_heads) += random_.pick({-1, 1});
    const bool in_place = random_.chance(0.5);
    const view_type from = in_place ? view(keys, values) : view();
    if (refused("pack", right, {&keys, &values}, [&] { cpu::pack(from, chosen.view(), to, one_); })) return;
    for (index_t row = 0; row < rows(); ++row) {
      for (index_t i = 0; i < chosen.counts[std::size_t(row)]; ++i) {
        const std::size_t begin = std::size_t(begins_[std::size_t(row)]);
        const std::size_t source = (begin + std::size_t(chosen.row(row)[i])) * dim,
                          target = (begin + std::size_t(i)) * dim;
        const bool is_same = std::equal(k_.data() + source, k_.data() + source + dim, keys.data() + target) &&
                             std::equal(v_.data() + source, v_.data() + source + dim, values.data() + target);
        must(is_same, "pack brings chosen rows together", "row ", row, ", slot ", i);
      }
    }
  }

  void merge() {
    const index_t tokens = random_.between(0, 3), count = random_.between(0, 3);
    const std::size_t rows_of_all = std::size_t(sequences_ * tokens * q_heads());
    bool right = true;
    std::vector<std::vector<float>> outs, lses;
    std::vector<attention_part> parts;
    for (index_t i = 0; i < count; ++i) {
      outs.push_back(noise(rows_of_all * dim + 1));
      lses.push_back(support::normals(random_, rows_of_all + 1, 3.0f));
      for (float& lse : lses.back()) lse = random_.chance(0.2) ? -infinity : lse;
    }
    for (index_t i = 0; i < count; ++i) {
      auto out = nhd_rows<const float>(outs[std::size_t(i)].data(), tokens, q_heads(), dim, sequences_);
      auto lse = nhd_rows<const float>(lses[std::size_t(i)].data(), tokens, q_heads(), 1, sequences_);
      if (random_.chance(0.05)) {
        random_.chance(0.5) ? out.heads -= 1 : lse.tokens += 1;
        right = false;
      }
      if (random_.chance(0.03)) {
        (random_.chance(0.5) ? out.data : lse.data) = nullptr;
        right = false;
      }
      parts.push_back({out, lse});
    }
    std::vector<float> out(rows_of_all * dim + 1, 3.0f), lse(rows_of_all + 1, 3.0f);
    auto to = nhd_rows(out.data(), tokens, q_heads(), dim, sequences_);
    auto lse_rows = random_.chance(0.5) ? nhd_rows(lse.data(), tokens, q_heads(), 1, sequences_) : rows_view<float>{};
    if (random_.chance(0.05)) {
      random_.chance(0.5)   ? to.data = nullptr
      : random_.chance(0.5) ? (to.tokens = -1, to.data)
                            : (to.dim = 128, to.data);
      right = false;
    }
    if (refused("merge_parts", right, {&out, &lse},
                [&] { cpu::merge_parts<dim>(parts, rule_.sink_logits, to, lse_rows); }) ||
        rows_of_all == 0)
      return;
    const index_t row = random_.between(0, index_t(rows_of_all) - 1), h = row % q_heads();
    std::vector<double> want(dim, 0.0);
    double total = rule_.sink_logits ? std::exp(double(sinks_[std::size_t(h)])) : 0.0;
    for (index_t i = 0; i < count; ++i) {
      const double weight = std::exp(double(lses[std::size_t(i)][std::size_t(row)]));
      total += weight;
      for (int d = 0; d < dim && weight > 0; ++d)
        want[std::size_t(d)] += weight * outs[std::size_t(i)][std::size_t(row * dim + d)];
    }
    for (double& x : want) x = total > 0 ? x / total : 0.0;
    must(support::row_error(out.data() + row * dim, want) < 1e-5, "merged parts are the oracle's", "row ", row, " of ",
         count, " parts");
    if (lse_rows.data) {
      must(support::number_error(lse[std::size_t(row)], std::log(total)) < 1e-5, "a merged log-sum-exp is the oracle's",
           "row ", row, " of ", count, " parts");
    }
  }

  void choose() {
    const bool right = !random_.chance(0.05);
    std::vector<float> scores = support::tied_scores(random_, rows() * room, random_.pick({1, 3, 40}));
    for (float& score : scores) score = random_.chance(0.02) ? std::nanf("") : score;
    layer_scores raw;
    raw.kv_heads = right ? kv_heads_ : random_.pick({0, -1});
    raw.protected_tail = random_.between(0, 6);
    raw.tokens = lengths_.data();
    raw.offsets = begins_.data();
    raw.scores = scores.data();
    const index_t budget = random_.between(std::max(1, raw.protected_tail), 24);
    selection kept;
    const auto with = [&](auto policy) {
      policy.scorer.window = std::max(1, raw.protected_tail);
      policy.budget.tokens = budget;
      return refused("choose_kept", right, {&scores}, [&] { cpu::choose_kept(policy, raw, kept, retaining_); });
    };
    const bool uniformly = random_.chance(0.5);
    if (uniformly ? with(retain<observation_window, uniform, top_tokens>{})
                  : with(retain<observation_window, adaptive, top_tokens>{}))
      return;
    must(kept.rows() == kv_heads_, "each head gets a list", kept.rows());
    for (index_t h = 0; h < kv_heads_; ++h) {
      const index_t n = lengths_[std::size_t(h)], count = kept.counts[std::size_t(h)];
      must(!uniformly || count == std::min(n, budget), "a uniform budget is used up", "head ", h, ": ", count, " of ",
           n);
      must(count <= n && count >= std::min(n, raw.protected_tail), "at least the protected tokens are kept", "head ", h,
           ": ", count, " of ", n);
      for (index_t i = 0; i < count; ++i) {
        const index_t slot = kept.row(h)[i];
        must(slot >= (i == 0 ? 0 : kept.row(h)[i - 1] + 1) && slot < n, "slots ascend", "head ", h, ", number ", i,
             ": ", slot);
      }
      for (index_t i = 1; i <= std::min(count, raw.protected_tail); ++i)
        must(kept.row(h)[count - i] == n - i, "the protected tail is kept", "head ", h, ", token ", n - i);
    }
  }

  void choose_pages() {
    bool right = true;
    const index_t tokens = random_.between(1, 3), page = random_.between(1, 6);
    const auto q = queries(tokens, right);
    const index_t b = random_.between(0, sequences_ - 1), h = random_.between(0, kv_heads_ - 1);
    // The index is of one sequence: its view begins with that sequence's rows.
    view_type one = view();
    one.sequences = 1;
    one.lengths += b * kv_heads_;
    one.position_begin += b * kv_heads_;
    one.table.begin += b * kv_heads_;
    cpu::page_index<float, dim> index;
    index.reset(kv_heads_, page);
    index.extend(one);
    auto pages = index.view();
    auto asked = q;
    if (asked.sequences == sequences_)
      asked.sequences = 1;
    else if (asked.sequences == 1)
      asked.sequences = 2;
    const bool fits = !random_.chance(0.1);
    index_t head = h, tail = random_.between(0, 2), read = random_.between(tail, 20);
    if (!fits) {
      switch (random_.between(0, 3)) {
        case 0:
          head = random_.pick({-1, int(kv_heads_)});
          break;
        case 1:
          pages.page = random_.pick({0, -3});
          break;
        case 2:
          tail = -1;
          break;
        default:
          read = -1;
      }
    }
    std::vector<index_t> out(room, no_index);
    std::vector<float> mass(64, 5.0f);
    hybrid_min_max scorer;
    scorer.page = page;
    scorer.channels = random_.pick({1, 16, dim});
    cpu::page_choice made;
    if (refused("choose_by_pages", right && fits, {&mass}, [&] {
          made = cpu::choose_by_pages(one, 0, head, pages, query_rows<float>{asked, first_.data()}, rule_, scorer,
                                      tokens_or_pages{selection_unit::token, page}, tail, read, out.data(), mass.data(),
                                      paging_);
        })) {
      must(std::count(out.begin(), out.end(), no_index) == room, "a refused call writes nothing", "choose_by_pages");
      return;
    }
    const index_t n = one.length(0, h);
    must(made.count == std::min(n, read), "a step reads what it may", made.count, " of ", n);
    for (index_t i = 0; i < made.count; ++i) {
      const index_t slot = out[std::size_t(i)];
      must(slot >= (i == 0 ? 0 : out[std::size_t(i - 1)] + 1) && slot < n, "slots ascend", "number ", i, ": ", slot);
    }
    for (const float share : std::vector(mass.begin(), mass.begin() + tokens * group_))
      must(share >= 0 && share <= 1, "a mass is a share", share);
  }

  template <class Q>
  using query_rows = cpu::query_rows<Q>;

  logit_rule rule_;
  cpu::executor one_{1};
  cpu::decode_workspace decode_;
  cpu::score_workspace<dim> scoring_;
  cpu::retain_workspace retaining_;
  cpu::page_workspace<dim> paging_;
};

}  // namespace

TEST_CASE("random calls of the operations do what the contract says, and a refused one writes nothing") {
  constexpr index_t at_once = 100;  // over one batch
  const index_t calls = calls_in_all();
  for (index_t done = 0; done < calls; done += at_once) {
    if (!support::is_mine(done / at_once)) continue;
    const auto seed = std::uint64_t(70001 + done);
    const std::string wrong = support::wrong_of_operations<operations>(seed, std::min(at_once, calls - done));
    REQUIRE(wrong == "");
  }
}
