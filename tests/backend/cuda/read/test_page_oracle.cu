// Paged retrieval on the GPU against the oracle in double, over thousands of random shapes: what a step reads is the
// oracle's choice but for scores that fp32 cannot tell apart, and exact ties go to the earlier slot.
#include <optional>
#include <string>

#include "backend/cuda/device.hpp"
#include "backend/cuda/read/page_memory.hpp"
#include "catch.hpp"
#include "support/kv_tensor.hpp"
#include "support/page_oracle.hpp"
#include "tessera/backend/cpu/kernel/executor.hpp"
#include "tessera/backend/cuda/read/extrema/page_retrieval.cuh"
#include "tessera/scorer/chosen_channels.hpp"
#include "tessera/scorer/hybrid_min_max.hpp"
#include "tessera/scorer/page_min_max.hpp"

using namespace tessera;
using gpu_test::arena;
using gpu_test::gpu_missing;
using gpu_test::memory;
namespace oracle = support::oracle;

namespace {

oracle::estimate kind_of(const hybrid_min_max&) { return oracle::estimate::hsa; }
oracle::estimate kind_of(const page_min_max&) { return oracle::estimate::quest; }
oracle::estimate kind_of(const chosen_channels&) { return oracle::estimate::sparq; }

template <class Scorer, int D>
Scorer random_scorer(support::rng& random) {
  if constexpr (std::is_same_v<Scorer, hybrid_min_max>) {
    return {random.between(1, 16), random.pick({random.between(1, D), D})};
  } else if constexpr (std::is_same_v<Scorer, page_min_max>) {
    return {random.between(1, 16), D};
  } else {
    return {random.pick({random.between(1, D), D}), random.pick({-1, 0})};
  }
}

/// One random shape with its data, and where it lies on the device.
template <class T, int D, class Scorer>
class sample {
  using view_type = kv_view<const T, D>;

 public:
  explicit sample(std::uint64_t seed) : sample(support::rng(seed)) {}

  /// In two launches in place of one: racecheck takes seconds for a cluster of blocks.
  void use_no_cluster() { apart_ = true; }

  std::size_t scratch_bytes() const { return index_bytes() + choose_->workspace_bytes() + 256; }

  void prepare(cuda::device_info device) {
    if (alone_) device.multiprocessors = 1;
    choose_.emplace(scorers_[0], unit_, bounds_, kv_.sequences, kv_.kv_heads, q_heads(), most_tokens_, device);
    for (const read_plan& plan : plans_) choose_->require_covered(plan);
    stride_ = choose_->max_chosen() + spare_;
  }

  void place(memory& at) {
    auto before = kv_.lengths;
    for (auto& n : before) n = std::max(0, n - joined_);
    k_at_ = at.in.put(kv_.k), q_at_ = at.in.put(q_), positions_at_ = at.in.put(kv_.positions);
    before_at_ = at.in.put(before), lengths_at_ = at.in.put(kv_.lengths), first_at_ = at.in.put(first_);
    sinks_at_ = at.in.put(sinks_), plans_at_ = at.in.put(plans_);
    out_at_ = at.out.put(std::vector<index_t>(std::size_t(rows() * stride_), untouched));
    counts_at_ = at.out.put(std::vector<index_t>(std::size_t(rows()), untouched));
    mass_at_ = at.out.put(std::vector<float>(std::size_t(rows() * query_rows()), -1.0f));
  }

  /// Launches what a step does: the index of what was there before, the step's tokens on top, the choice.
  void launch(const memory& at, unsigned char* scratch) const {
    view_type view;
    view.sequences = kv_.sequences;
    view.kv_heads = kv_.kv_heads;
    view.k = view.v = at.in.device<const T>(k_at_);
    view.k_strides = view.v_strides = {offset_t(kv_.kv_heads) * kv_.slots * D, offset_t(kv_.slots) * D, D, 1};
    view.length_strides = {kv_.kv_heads, 1};
    if (!kv_.positions.empty()) {
      view.positions = at.in.device<const index_t>(positions_at_);
      view.position_strides = {offset_t(kv_.kv_heads) * kv_.slots, kv_.slots};
    }
    const page_extrema_view<T, D> index{reinterpret_cast<T*>(scratch), 1, index_room(), nullptr, nullptr};
    const auto* plans = at.in.device<const read_plan>(plans_at_);
    const cuda::index_pages<view_type> pages;
    view.lengths = at.in.device<const index_t>(before_at_);
    pages.build(view, index, plans, built_pages_, nullptr);
    view.lengths = at.in.device<const index_t>(lengths_at_);
    if (fold_ && joined_ > 0) pages.fold(view, index, plans, joined_, nullptr);
    cuda::page_problem<view_type> p;
    p.view = view;
    p.plans = plans;
    p.index = index;
    p.unfolded = fold_ ? 0 : joined_;
    p.q = nhd_rows<const T>(at.in.device<const T>(q_at_), tokens_, q_heads(), D, kv_.sequences);
    p.first_position = at.in.device<const index_t>(first_at_);
    p.rule = rule_;
    p.rule.sink_logits = sinks_.empty() ? nullptr : at.in.device<const float>(sinks_at_);
    p.out = at.out.device<index_t>(out_at_);
    p.out_stride = stride_;
    p.counts = at.out.device<index_t>(counts_at_);
    p.mass = weighed_ ? at.out.device<float>(mass_at_) : nullptr;
    unsigned char* workspace = scratch + index_bytes();
    if (apart_) {
      choose_->score(p, workspace, nullptr);
      choose_->select(p, workspace, nullptr);
    } else {
      choose_->run(p, workspace, nullptr);
    }
  }

  struct finding {
    std::string fault;  ///< empty where all is well
    index_t rows = 0, chosen = 0, open = 0;
  };

  finding check(memory& at) const {
    finding result;
    for (index_t s = 0; s < kv_.sequences && result.fault.empty(); ++s) {
      for (index_t h = 0; h < kv_.kv_heads && result.fault.empty(); ++h) check_row(at, s, h, result);
    }
    return result;
  }

  std::string text() const {
    std::string lengths, plans;
    for (const index_t n : kv_.lengths) lengths += " " + std::to_string(n);
    for (const read_plan& plan : plans_) {
      plans += "(page " + std::to_string(plan.page) + ", channels " + std::to_string(plan.channels) + ", read " +
               std::to_string(plan.read) + ", tail " + std::to_string(tail(plan)) + ") ";
    }
    return std::string(Scorer::name) + ", D " + std::to_string(D) + ", lengths" + lengths + ", kv_heads " +
           std::to_string(kv_.kv_heads) + ", group " + std::to_string(group_) + ", tokens " + std::to_string(tokens_) +
           (unit_ == selection_unit::page ? ", by page, plans " : ", by token, plans ") + plans + "of usually " +
           std::to_string(bounds_.usual_pages) + " pages, window " + std::to_string(rule_.sliding_window) +
           (apart_   ? ", apart"
            : alone_ ? ", a block alone"
                     : "") +
           ", joined " + std::to_string(joined_) + (fold_ ? " by fold" : "");
  }

 private:
  static constexpr index_t untouched = 0x77777777;

  explicit sample(support::rng random) : kv_(random_keys(random)) {
    group_ = random.between(1, 8);
    tokens_ = random.pick({1, 1, 2, 3, 4});
    most_tokens_ = random.pick({tokens_, 8});
    unit_ = random.pick({selection_unit::token, selection_unit::page});
    // Every sequence has a plan of its own.
    bounds_.capacity = random.pick({kv_.slots, kv_.slots * 3 + 5});
    for (index_t s = 0; s < kv_.sequences; ++s) {
      const index_t read =
          random.pick({random.between(1, kv_.slots), random.between(1, std::max(1, kv_.slots / 8)),
                       random.between(1, std::max(1, kv_.slots / 2)), kv_.slots + random.between(0, 20)});
      scorers_.push_back(random_scorer<Scorer, D>(random));
      plans_.push_back(read_plan::fitted_to(scorers_.back(), read));
      bounds_.cover(plans_.back(), bounds_.capacity);
    }
    // Rows of more pages than usual are chosen through device memory.
    bounds_.usual_pages = random.pick({bounds_.usual_pages, bounds_.usual_pages, 0, random.between(1, 40)});
    built_pages_ = random.between(1, 64);
    alone_ = random.chance(0.3);
    joined_ = random.pick({tokens_, 1, 0, 8});
    fold_ = random.chance(0.5);
    apart_ = random.chance(0.4);
    weighed_ = Scorer::normalised && random.chance(0.7);
    spare_ = random.pick({0, 3});
    if (random.chance(0.3)) kv_.scatter_positions(random);
    for (index_t s = 0; s < kv_.sequences; ++s) first_.push_back(std::max(0, kv_.newest(s) - tokens_ + 1));
    // Few values: keys, channels and signs tie. Sums of several softmaxes could tie by chance in one arithmetic only.
    const index_t sort = random.between(0, 3);
    const bool few_q = sort == 0 && (!Scorer::normalised || query_rows() <= 2);
    exact_ = few_q && !Scorer::normalised;
    if (sort == 0) {
      for (auto& x : kv_.k) x = T(float(random.between(-2, 2)));
    } else if (sort == 1) {
      const auto keys = support::repeated_rows(random, index_t(kv_.k.size()) / D, D, random.between(1, 4));
      for (std::size_t i = 0; i < keys.size(); ++i) kv_.k[i] = T(keys[i]);
    }
    kv_.remember();
    for (const float x : support::normals(random, std::size_t(kv_.sequences * tokens_ * q_heads() * D),
                                          random.pick({0.3f, 1.0f, 2.0f}))) {
      q_.push_back(T(few_q ? float(random.between(-2, 2)) : x));
    }
    if (random.chance(0.05)) std::fill(q_.begin(), q_.begin() + D, T(0.0f));
    if (random.chance(0.2)) sinks_ = support::normals(random, std::size_t(q_heads()), 3);
    if (random.chance(0.15)) rule_.soft_cap = 5;
    if (random.chance(0.25)) rule_.sliding_window = random.between(1, 80);
    if (random.chance(0.1)) rule_.scale = 0.2f;
  }

  static support::kv_tensor<T, D, 1> random_keys(support::rng& random) {
    const index_t sequences = random.pick({1, 2, 3}), kv_heads = random.between(1, 2);
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r) {
      lengths.push_back(random.pick({r == 0 ? 1 : 0, 31, 32, 33, 64, 65, random.between(1, 40), random.between(1, 200),
                                     random.between(1, 200), random.chance(0.1) ? random.between(200, 1500) : 129}));
    }
    return support::kv_tensor<T, D, 1>(random, sequences, kv_heads, std::move(lengths));
  }

  index_t rows() const { return kv_.sequences * kv_.kv_heads; }
  index_t q_heads() const { return group_ * kv_.kv_heads; }
  index_t query_rows() const { return group_ * tokens_; }
  index_t tail(const read_plan& plan) const { return std::max(tokens_ > 1 ? tokens_ : 0, plan.tail); }
  index_t index_room() const { return (ceil_div(kv_.slots, bounds_.page) + 7) / 8 * 8; }
  std::size_t index_bytes() const {
    return (std::size_t(rows()) * 2 * D * std::size_t(index_room()) * sizeof(T) + 255) / 256 * 256;
  }

  oracle::page_scores expected(index_t sequence, index_t head) const {
    std::vector<std::vector<float>> rows;
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, heads, positions;
    for (index_t r = 0; r < query_rows(); ++r) {
      const index_t q_head = head * group_ + r % group_;
      const T* row = q_.data() + ((offset_t(sequence) * tokens_ + r / group_) * q_heads() + q_head) * D;
      rows.emplace_back(row, row + D);
      at.push_back(first_[std::size_t(sequence)] + r / group_);
      heads.push_back(q_head);
    }
    for (const auto& row : rows) queries.push_back(row.data());
    for (index_t slot = 0; slot < kv_.length(sequence, head); ++slot) {
      keys.push_back(kv_.k_float.data() + kv_.row(sequence, head, slot) * D);
      positions.push_back(kv_.position(sequence, head, slot));
    }
    logit_rule rule = rule_;
    rule.sink_logits = sinks_.empty() ? nullptr : sinks_.data();
    const read_plan& plan = plans_[std::size_t(sequence)];
    return oracle::score_pages({kind_of(scorers_[0]), plan.page, plan.channels}, queries, at, heads, keys, positions, D,
                               rule);
  }

  void check_row(memory& at, index_t sequence, index_t head, finding& result) const {
    const index_t row = sequence * kv_.kv_heads + head, n = kv_.length(sequence, head);
    const index_t* out = at.out.host<index_t>(out_at_) + row * stride_;
    const index_t count = at.out.host<index_t>(counts_at_)[row];
    const auto blame = [&](const std::string& what) {
      result.fault = what + " in row " + std::to_string(row) + " of " + text();
    };
    if (count < 0 || count > stride_) return blame("a count of " + std::to_string(count));
    const std::vector<index_t> got(out, out + count);
    for (index_t i = 0; i < stride_; ++i) {
      if (i >= count && out[i] != untouched) return blame("a write behind the choice");
      if (i < count && (out[i] < 0 || out[i] >= n || (i > 0 && out[i] <= out[i - 1])))
        return blame("no ascending slots");
    }
    ++result.rows;
    const read_plan& plan = plans_[std::size_t(sequence)];
    if (n <= plan.read) {
      if (count != n) blame("not everything");
      return;
    }
    ++result.chosen;
    const auto scores = expected(sequence, head);
    const bool by_page = unit_ == selection_unit::page;
    const auto want = by_page ? oracle::top_pages(scores.scores, tail(plan), plan.read, plan.page)
                              : oracle::top_tokens(scores.scores, tail(plan), plan.read);
    const auto verdict = oracle::compare_choices(scores, want, got, by_page ? plan.page : 1);
    if (verdict == oracle::agreement::wrong) return blame("another choice");
    if (verdict == oracle::agreement::rounding && exact_) return blame("another choice of exact scores");
    result.open += verdict == oracle::agreement::rounding;
    for (index_t r = 0; r < query_rows() && weighed_ && !scores.ambiguous; ++r) {
      const auto& probabilities = scores.probabilities[std::size_t(r)];
      double mass = 0;
      for (const index_t slot : got) mass += probabilities[std::size_t(slot)];
      if (std::none_of(probabilities.begin(), probabilities.end(), [](double p) { return p > 0; })) mass = 1;
      const double said = at.out.host<float>(mass_at_)[row * query_rows() + r];
      if (!(std::abs(said - mass) <= 3e-4)) {
        return blame("a mass of " + std::to_string(said) + " for " + std::to_string(mass));
      }
    }
  }

  support::kv_tensor<T, D, 1> kv_;
  std::vector<Scorer> scorers_;  // by sequence
  std::vector<read_plan> plans_;
  cuda::read_bounds bounds_;
  selection_unit unit_;
  index_t group_, tokens_, most_tokens_, joined_, spare_, built_pages_;
  bool fold_, apart_, alone_, weighed_, exact_;
  std::vector<T> q_;  // [sequences, tokens, q_heads, D]
  std::vector<index_t> first_;
  std::vector<float> sinks_;  // [q_heads], or empty
  logit_rule rule_{};
  std::optional<cuda::choose_pages<view_type, Scorer>> choose_;
  offset_t stride_ = 0;
  std::size_t k_at_, q_at_, positions_at_, before_at_, lengths_at_, first_at_, sinks_at_, plans_at_, out_at_,
      counts_at_, mass_at_;
};

/// `shapes` random shapes, a launch each. Host work (making them, the oracle) is spread over the cores.
template <class T, int D, class Scorer>
void agree_with_the_oracle(std::uint64_t seed, index_t shapes) {
  using sample_type = sample<T, D, Scorer>;
  constexpr index_t chunk = 128;
  static cpu::executor workers;
  static memory at;
  const auto device = cuda::device_info::current();
  shapes = support::scaled(shapes);
  typename sample_type::finding all;
  for (index_t begin = 0; begin < shapes; begin += chunk) {
    const index_t count = std::min(chunk, shapes - begin);
    std::vector<std::optional<sample_type>> samples(static_cast<std::size_t>(count));
    std::vector<typename sample_type::finding> findings(samples.size());
    workers.for_each(
        count, [&](index_t i, int) { samples[std::size_t(i)].emplace(seed * 1'000'000 + std::uint64_t(begin + i)); });
    if (support::scaled(100) < 10) {  // a sanitizer's run: clusters in one shape only, and that in few tests
      for (index_t i = D == 64 && begin == 0 ? 1 : 0; i < count; ++i) samples[std::size_t(i)]->use_no_cluster();
    }
    at.in.clear();
    at.out.clear();
    at.scratch.fill(0xff);
    for (auto& one : samples) {
      one->prepare(device);
      one->place(at);
    }
    at.in.upload();
    at.out.upload();
    for (const auto& one : samples) {  // in one stream, so that all may have the same scratch
      REQUIRE(one->scratch_bytes() <= at.scratch.count);
      one->launch(at, at.scratch.data);
    }
    cuda::check(cudaDeviceSynchronize(), "choose_pages");
    at.out.download();
    workers.for_each(count, [&](index_t i, int) { findings[std::size_t(i)] = samples[std::size_t(i)]->check(at); });
    for (const auto& found : findings) {
      INFO(found.fault);
      REQUIRE(found.fault.empty());
      all.rows += found.rows;
      all.chosen += found.chosen;
      all.open += found.open;
    }
  }
  INFO(shapes << " shapes, " << all.rows << " rows, " << all.chosen << " with a choice, " << all.open
              << " by rounding");
  CHECK(all.open <= 0.02 * all.chosen + 5);
  if (shapes >= 100) CHECK(2 * all.chosen > all.rows);
}

}  // namespace

// 10,200 shapes in all.
TEST_CASE("hybrid sparse attention on the device chooses what the oracle chooses", "[gpu]") {
  if (gpu_missing()) return;
  agree_with_the_oracle<bf16, 64, hybrid_min_max>(401, 1'000);
  agree_with_the_oracle<fp16, 80, hybrid_min_max>(402, 700);
  agree_with_the_oracle<bf16, 96, hybrid_min_max>(403, 700);
  agree_with_the_oracle<fp16, 128, hybrid_min_max>(404, 1'400);
  agree_with_the_oracle<bf16, 192, hybrid_min_max>(405, 700);
  agree_with_the_oracle<fp16, 256, hybrid_min_max>(406, 700);
}

TEST_CASE("Quest on the device chooses what the oracle chooses", "[gpu]") {
  if (gpu_missing()) return;
  agree_with_the_oracle<fp16, 64, page_min_max>(411, 900);
  agree_with_the_oracle<bf16, 96, page_min_max>(412, 800);
  agree_with_the_oracle<bf16, 256, page_min_max>(413, 800);
}

TEST_CASE("SparQ on the device chooses what the oracle chooses", "[gpu]") {
  if (gpu_missing()) return;
  agree_with_the_oracle<bf16, 64, chosen_channels>(421, 900);
  agree_with_the_oracle<fp16, 80, chosen_channels>(422, 800);
  agree_with_the_oracle<bf16, 192, chosen_channels>(423, 800);
}
