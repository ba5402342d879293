// Rung 10: rung 9 on the GPU. Pools, tables, lengths and positions are the engine's, on its device; what Tessera does goes to
// the engine's stream, allocates nothing and waits for nobody. The engine looks at the freed pages when it wants to.
// The regions between markers stand in docs/engines.md word for word; a check compares them.
#include <cstdio>

#include <tessera/backend/cuda/attend/decode/decode_attention.cuh>
#include <tessera/backend/cuda/choose/score_and_choose.cuh>
#include <tessera/backend/cuda/store/free_pages.cuh>
#include <tessera/methods/ada_snapkv.hpp>

#include "own_pages/own_pages.cuh"

using namespace own_pages;
using view_type = kv_view<bf16, dim, block_table>;
using policy_type = decltype(ada_snapkv<bf16, dim>::retain);

// [evict]
/// Operations are made once, for the largest batch, and say how much memory they need.
struct eviction {
  cuda::score_and_choose<view_type, policy_type> choose;
  cuda::pack<view_type, view_type, true> move;  // in place
  cuda::device_buffer<unsigned char> choosing, moving;

  eviction(const policy_type& policy, index_t window, const cuda::device_info& device, cudaStream_t stream)
      : choose(policy, {sequences, heads, q_heads, window, slots}, device),
        move(sequences, heads, slots, device),
        choosing(choose.workspace_bytes()),
        moving(move.workspace_bytes()) {
    move.prepare(moving.data(), stream);
  }

  /// One layer keeps what the first stage of a method chooses by the newest queries of each sequence, of which the first
  /// `seen` count.
  void run(const policy_type& policy, const memory<bf16>& e, index_t layer, const rows_view<const bf16>& q,
           const index_t* seen, const index_t* first_position, cudaStream_t stream) const {
    choose_problem<view_type> p;
    p.view = e.view(layer);
    p.layer = layer;
    p.layers = layers;
    p.q = q;
    p.valid = seen;
    p.first_position = first_position;
    const selection_view kept = choose.run(policy, p, choosing.data(), stream);

    pack_problem<view_type, view_type> rows{p.view, kept, p.view};
    rows.positions = e.position_column(layer);
    rows.lengths = e.layer_lengths(layer);
    move.run(rows, moving.data(), stream);
  }
};

/// Lists on the device the pages that nobody needs, once all layers have evicted. `spare_tokens`: tokens to come.
void free_pages(const device_engine& e, index_t spare_tokens, cudaStream_t stream) {
  free_pages_problem<view_type> p;
  p.view = e.pools().view(0);
  p.layers = layers;  // they share the tables: a page is empty when it is so in all of them
  p.layer_stride = rows;
  p.spare_tokens = spare_tokens;
  p.page_counts = e.held.data();  // pages of each sequence, before and after
  p.freed = e.freed.data();
  p.freed_stride = max_blocks;
  p.freed_count = e.freed_count.data();
  cuda::free_pages(p, stream);
}
// [evict]

// [attend]
/// Attention of a decode step.
struct step_attention {
  cuda::decode_attention<view_type> attend;  // made once, for the largest batch
  cuda::device_buffer<unsigned char> workspace;

  step_attention(const cuda::device_info& device, cudaStream_t stream)
      : attend(sequences, heads, q_heads, 1, device), workspace(attend.workspace_bytes()) {
    attend.prepare(workspace.data(), stream);
  }

  /// The step's tokens are stored already. All pointers are the device's: q, out [sequences, 1, q_heads, dim],
  /// first_position [sequences], the position of each query.
  void run(const memory<bf16>& e, index_t layer, const rows_view<const bf16>& q, const index_t* first_position,
           const rows_view<float>& out, cudaStream_t stream) const {
    cuda::decode_problem<view_type> p{};  // rule, lse and chosen stay empty: plain logits, no lse, all that is stored
    p.view = e.view(layer);
    p.q = q;
    p.first_position = first_position;
    p.out = out;
    attend.run(p, workspace.data(), stream);
  }
};
// [attend]

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device on this machine");
    return 0;
  }
  constexpr index_t window = 32, steps = 30;
  const model x;
  counts next(sequences), seen{window, 20, window};  // the second prompt is shorter than the window
  device_engine e({250 + 2 * steps, 20 + 2 * steps, 129 + 2 * steps});
  const auto device = cuda::device_info::current();
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  ada_snapkv<bf16, dim> method;  // heads of a layer compete: they keep different numbers of tokens
  method.set_budget(48);
  const eviction evict(method.retain, window, device, stream);
  const step_attention attention(device, stream);
  const cuda::device_buffer<float> out(sequences * q_heads * dim);
  ladder::checks check;

  e.append(x, {250, 20, 129}, next, stream);
  for (int turn = 0; turn < 2; ++turn) {
    counts first = next;
    for (index_t b = 0; b < sequences; ++b) first[std::size_t(b)] -= seen[std::size_t(b)];
    const auto d_seen = on_device(seen), d_first = on_device(first);
    const device_queries q[layers] = {{x, 0, first, seen}, {x, 1, first, seen}};
    for (index_t layer = 0; layer < layers; ++layer) {
      evict.run(method.retain, e.pools(), layer, q[layer].rows, d_seen.data(), d_first.data(), stream);
    }
    free_pages(e, (2 - turn) * steps, stream);
    std::printf("%d pages are free again\n", int(e.take_back()));
    double worst = 0;
    for (index_t step = 0; step < steps; ++step) {
      const counts newest = next;
      e.append(x, counts(sequences, 1), next, stream);
      const auto d_newest = on_device(newest);
      for (index_t layer = 0; layer < layers; ++layer) {
        const device_queries q_step(x, layer, newest, counts(sequences, 1));
        attention.run(e.pools(), layer, q_step.rows, d_newest.data(), nhd_rows(out.data(), 1, q_heads, dim, sequences),
                      stream);
        worst = std::max(worst, e.worst_error(x, out, layer, newest));
      }
    }
    check(worst < 0.02, "steps over the pages that are left equal attention over the kept rows");
    seen.assign(sequences, steps);  // the second eviction goes by the steps' queries
  }
  return check.exit_code();
}
