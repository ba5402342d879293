// Rung 4: an engine keeps its memory. A kv_view describes it, the low-level operations read it where it is.
#include <algorithm>
#include <cmath>
#include <tessera/backend/cpu/attend/attend.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t sequences = 2, q_heads = 4, heads = 2, dim = 64, page = 16;
  const index_t lengths[sequences] = {100, 37};  // of uneven length; the last page is partly filled
  const ladder::tensors first(100, q_heads, heads, dim, 1), second(37, q_heads, heads, dim, 2);
  const ladder::tensors* const contents[sequences] = {&first, &second};

  // Four homes for the same tokens, all of the pages out of order.
  //   plain       K and V [sequences, tokens, heads, dim]
  //   vLLM, GPU   one pool [pages, page, heads, 2 * dim], K and V in one row (NHD; as HND [pages, heads, page, 2 * dim]),
  //               block_table [sequences, max_blocks]
  //   vLLM, CPU   one pool; of each page and head first the keys [dim, page], then the values [page, dim]; the same table
  //   FlashInfer  one pool [pages, 2, heads, page, dim] (HND), CSR indptr and indices
  constexpr index_t most = 112, pages = 16, max_blocks = 7;
  std::vector<bf16> plain_k(sequences * most * heads * dim), plain_v(plain_k.size());
  std::vector<bf16> vllm(2 * pages * page * heads * dim), vllm_cpu(vllm.size()), flashinfer(vllm.size());
  std::vector<index_t> blocks(sequences * max_blocks, -1), indptr{0, 7, 10}, indices{12, 3, 8, 0, 15, 6, 1, 9, 4, 11};
  for (index_t i = 0; i < 7; ++i) blocks[std::size_t(i)] = indices[std::size_t(i)];
  for (index_t i = 0; i < 3; ++i) blocks[std::size_t(max_blocks + i)] = indices[std::size_t(7 + i)];

  // `lengths` has one entry per sequence, so head strides of lengths stay 0. Strides count elements.
  const auto describe = [&]<class Table>(bf16* k, bf16* v, row_strides k_strides, row_strides v_strides, Table table) {
    kv_view<bf16, dim, Table> view;
    view.k = k;
    view.v = v;
    view.k_strides = k_strides;  // outer (sequence or page), head, token, element
    view.v_strides = v_strides;
    view.sequences = sequences;
    view.kv_heads = heads;
    view.lengths = lengths;
    view.length_strides = {1, 0};
    view.table = table;
    return view;
  };
  const offset_t half_page = offset_t(page) * heads * dim;
  const block_table table{blocks.data(), page, max_blocks};
  const row_strides rows{most * heads * dim, dim, heads * dim}, doubled{2 * half_page, 2 * dim, 2 * heads * dim},
      by_head{2 * half_page, page * dim, dim};
  const auto plain = describe(plain_k.data(), plain_v.data(), rows, rows, contiguous{});
  const auto vllm_pages = describe(vllm.data(), vllm.data() + dim, doubled, doubled, table);
  const auto vllm_cpu_pages =
      describe(vllm_cpu.data(), vllm_cpu.data() + page * dim, {2 * half_page, 2 * page * dim, 1, page},
               {2 * half_page, 2 * page * dim, dim}, table);
  const auto hnd_pages = describe(flashinfer.data(), flashinfer.data() + half_page, by_head, by_head,
                                  csr_table{indptr.data(), indices.data(), page});

  const auto fill = [&](const auto& view) {  // an engine has done this already
    for (index_t b = 0; b < sequences; ++b) {
      for (index_t t = 0; t < lengths[b]; ++t) {
        for (index_t h = 0; h < heads; ++h) {
          const float *k = contents[b]->keys(t, 1).row(0, 0, h), *v = contents[b]->values(t, 1).row(0, 0, h);
          for (index_t d = 0; d < dim; ++d) {
            view.key(b, h, t)[d * view.k_strides.dim] = bf16(k[d]);
            view.value(b, h, t)[d * view.v_strides.dim] = bf16(v[d]);
          }
        }
      }
    }
  };
  const ladder::tensors step(sequences, q_heads, heads, dim, 3);
  const index_t positions[sequences] = {lengths[0] - 1, lengths[1] - 1};  // the query is that of the newest token
  cpu::executor workers;
  cpu::decode_workspace workspace;  // kept from step to step: nothing is allocated once it has grown
  const auto attend = [&](const auto& view) {
    fill(view);
    std::vector<float> out(sequences * q_heads * dim);
    const cpu::query_rows<float> queries{nhd_rows(step.q.data(), 1, q_heads, dim, sequences), positions};
    cpu::decode_attention(view, queries, logit_rule{}, nullptr,
                          cpu::attention_output{nhd_rows(out.data(), 1, q_heads, dim, sequences), {}}, workspace,
                          workers);
    return out;
  };
  ladder::checks check;
  const auto expected = attend(plain);
  check(attend(vllm_pages) == expected, "vLLM's pages give the same bits as contiguous memory");
  const auto in_columns = attend(vllm_cpu_pages);  // adds in another order
  float difference = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    difference = std::max(difference, std::abs(in_columns[i] - expected[i]));
  check(difference < 1e-5f, "vLLM's pages of the CPU, with keys in columns, give the same to rounding");
  check(attend(hnd_pages) == expected, "FlashInfer's CSR pages give the same bits as contiguous memory");
  return check.exit_code();
}
