// A decode step of RocketKV behind its first stage, and of Quest: estimating and choosing pages, and attending what was
// chosen.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"
#include "tessera/backend/cuda/read/extrema/page_index.cuh"
#include "tessera/backend/cuda/read/extrema/page_retrieval.cuh"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/rocketkv.hpp"

namespace gpu_bench::of_pages {
namespace {

using view_type = kv_view<bf16, head_dim>;

/// `apart`: a step in two launches, the choice and decode attention over it. `appended`: a step, and the append of its token
/// before it; `appended_plain`: one that lets no launch begin early.
enum class part { choose, attend, step, apart, appended, appended_plain };

/// One layer of a batch of `stored` rows behind prompts of `context` tokens, under a budget of `tokens`.
template <class Method>
prepared paged_step(index_t sequences, index_t context, index_t tokens, index_t stored, part wanted) {
  using scorer_type = typename Method::retrieve_type::scorer_type;
  Method recipe;
  recipe.set_budget(tokens);
  const stage_plan plan = recipe.plan(context);
  const scorer_type scorer = recipe.retrieve.planned(plan, head_dim).scorer;
  const read_plan reading = read_plan::fitted_to(scorer, plan.read);
  const index_t pages = (ceil_div(stored, scorer.page) + 15) / 16 * 16, rows = sequences * kv_heads;
  const std::size_t elements = std::size_t(rows) * std::size_t(stored) * head_dim;
  const std::size_t index_elements = std::size_t(rows) * 2 * head_dim * std::size_t(pages);

  prepared made;
  const double index_read = double(pages) * scorer.channels * sizeof(bf16);
  const double attended = double(std::min(plan.read, stored)) * head_dim * 2 * sizeof(bf16);
  made.bytes = rows * ((wanted != part::attend ? index_read : 0) + (wanted != part::choose ? attended : 0));
  // What is stored rotates, not only what is read: the next step of another layer finds none of it in the L2.
  const int sets = input_sets(double(elements) * 2 * sizeof(bf16));

  const auto device = cuda::device_info::current();
  cuda::read_bounds bounds{stored};
  bounds.cover(reading, (std::max)(stored, plan.capacity));
  cuda::choose_pages<view_type, scorer_type, float> choose(scorer, selection_unit::token, bounds, sequences, kv_heads,
                                                           q_heads, 1, device);
  cuda::decode_attention<view_type> attend(sequences, kv_heads, q_heads, 1, device);
  struct memory {
    buffer<read_plan> plans;
    buffer<index_t> lengths, before, first, indices, counts;
    buffer<bf16> index;
    buffer<float> out;
    buffer<unsigned char> choosing, attending;
  };
  const std::size_t q_rows = std::size_t(sequences) * q_heads, most = std::size_t(choose.max_chosen());
  const auto keep = std::make_shared<memory>(
      std::vector<read_plan>(std::size_t(sequences), reading), std::vector<index_t>(std::size_t(rows), stored),
      std::vector<index_t>(std::size_t(rows), stored - 1), std::vector<index_t>(std::size_t(sequences), stored - 1),
      std::size_t(rows) * most * std::size_t(sets), std::size_t(rows) * std::size_t(sets),
      index_elements * std::size_t(sets), q_rows * head_dim, choose.workspace_bytes(), attend.workspace_bytes());
  bf16* pool = random_rows(elements * 2 * std::size_t(sets) + q_rows * head_dim);
  attend.prepare(keep->attending.data(), stream());

  const auto view_of = [=](int set) {
    view_type view;
    view.k = pool + elements * 2 * std::size_t(set);
    view.v = view.k + elements;
    view.k_strides = {offset_t(kv_heads) * stored * head_dim, offset_t(stored) * head_dim, head_dim, 1};
    view.v_strides = view.k_strides;
    view.sequences = sequences;
    view.kv_heads = kv_heads;
    view.lengths = keep->lengths.data();
    view.length_strides = {kv_heads, 1};
    return view;
  };
  const auto index_of = [=](int set) {
    return page_extrema_view<bf16, head_dim>{keep->index.data() + index_elements * std::size_t(set), scorer.page, pages,
                                             nullptr, nullptr};
  };
  const auto chosen_of = [=](int set) {
    return selection_view{keep->indices.data() + std::size_t(set) * std::size_t(rows) * most,
                          keep->counts.data() + std::size_t(set) * std::size_t(rows), nullptr, offset_t(most)};
  };
  const rows_view<const bf16> q =
      nhd_rows<const bf16>(pool + elements * 2 * std::size_t(sets), 1, q_heads, head_dim, sequences);
  const auto problem_of = [=](int set) {
    cuda::page_problem<view_type> problem;
    problem.view = view_of(set);
    problem.plans = keep->plans.data();
    problem.index = index_of(set);
    problem.unfolded = 1;  // the step's own token joins its page
    problem.q = q;
    problem.first_position = keep->first.data();
    problem.out = const_cast<index_t*>(chosen_of(set).indices);
    problem.out_stride = offset_t(most);
    problem.counts = const_cast<index_t*>(chosen_of(set).counts);
    return problem;
  };
  const rows_view<float> out = nhd_rows(keep->out.data(), 1, q_heads, head_dim, sequences);
  const auto choose_now = [=](int set) { choose.run(problem_of(set), keep->choosing.data(), stream()); };
  const auto attend_now = [=](int set) {
    attend.run({view_of(set), q, keep->first.data(), {}, out, {}, chosen_of(set)}, keep->attending.data(), stream());
  };
  for (int set = 0; set < sets; ++set) {
    cuda::index_pages<view_type>{}.build(view_of(set), index_of(set), keep->plans.data(), pages, stream());
    choose_now(set);
  }
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const bool appends = wanted == part::appended || wanted == part::appended_plain;
    if (appends) {
      cuda::append_problem<view_type, bf16> fresh;
      fresh.view = view_of(i % sets);
      fresh.view.lengths = keep->before.data();
      fresh.k = fresh.v = nhd_rows<const bf16>(pool, 1, kv_heads, head_dim, sequences);
      cuda::append<view_type, bf16>(sequences, kv_heads, wanted == part::appended).run(fresh, nullptr, stream());
    }
    if ((wanted == part::step || appends) && choose.attends()) {
      choose.choose_and_attend(problem_of(i % sets), out, {}, keep->choosing.data(), stream());
      return;
    }
    if (wanted != part::attend) choose_now(i % sets);
    if (wanted != part::choose) attend_now(i % sets);
  });
  return made;
}

prepared rocket_step(index_t sequences, index_t context, index_t tokens, part wanted) {
  using method = rocketkv<bf16, head_dim>;
  method recipe;
  recipe.set_budget(tokens);
  const index_t half_answer = recipe.retain.budget.max_new / 2;
  return paged_step<method>(sequences, context, tokens, recipe.plan(context).capacity - half_answer, wanted);
}
/// `share` of 16 of the tokens are attended: half of Quest's budget.
prepared quest_step(index_t sequences, index_t context, index_t share, part wanted) {
  return paged_step<quest<bf16, head_dim>>(sequences, context, 2 * (context / 16 * share), context, wanted);
}

const int registered = [] {
  const auto cell = [](index_t sequences, const char* name, index_t context, index_t tokens) {
    const std::string where =
        "rocketkv/B" + std::to_string(sequences) + "/" + name + "/t" + std::to_string(tokens) + "/";
    add(where + "choose", [=] { return rocket_step(sequences, context, tokens, part::choose); });
    add(where + "attend", [=] { return rocket_step(sequences, context, tokens, part::attend); });
    add(where + "step", [=] { return rocket_step(sequences, context, tokens, part::step); });
    add(where + "apart", [=] { return rocket_step(sequences, context, tokens, part::apart); });
    if (tokens != 1024) return;
    add(where + "appended", [=] { return rocket_step(sequences, context, tokens, part::appended); });
    add(where + "appended_plain", [=] { return rocket_step(sequences, context, tokens, part::appended_plain); });
  };
  for (const index_t sequences : {1, 8}) {
    cell(sequences, "32K", 32768, 1024);
    cell(sequences, "96K", 98304, 1024);
    for (const index_t tokens : {256, 512, 1024, 2048, 4096}) cell(sequences, "128K", 131072, tokens);
    cell(sequences, "256K", 262144, 1024);
  }
  for (const index_t tokens : {256, 1024}) cell(32, "128K", 131072, tokens);  // more rows than clusters
  for (const index_t sequences : {4, 12, 16}) cell(sequences, "128K", 131072, 1024);
  // The shapes of bench_cuda_packed's MosaicKV.
  const auto of_quest = [](index_t sequences, const char* name, index_t context, index_t share) {
    const std::string where =
        "quest/B" + std::to_string(sequences) + "/" + name + "/" + (share == 1 ? "6.25" : "12.5") + "/";
    add(where + "choose", [=] { return quest_step(sequences, context, share, part::choose); });
    add(where + "attend", [=] { return quest_step(sequences, context, share, part::attend); });
    add(where + "step", [=] { return quest_step(sequences, context, share, part::step); });
  };
  of_quest(4, "256K", 262144, 1), of_quest(4, "256K", 262144, 2), of_quest(8, "128K", 131072, 1);
  of_quest(1, "256K", 262144, 1), of_quest(1, "64K", 65536, 1);
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_pages
