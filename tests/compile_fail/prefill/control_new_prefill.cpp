// Compiles: the prefill policy of docs/how_to/add_a_prefill.md.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>

using namespace tessera;

// [prefill]
/// Every row attends its newest `local` positions and the `columns` keys that the chunk's last row looks at most.
struct last_row_columns {
  static constexpr const char* name = "last_row_columns";
  static constexpr bool chooses_lines = true, host_only = true;

  index_t local = 512;
  index_t columns = 256;

  /// Whose attention it wants to see: positions in [first, next), ascending.
  void sample(index_t, index_t next, host_vector<index_t>& rows) const { rows.push_back(next - 1); }

  /// Of one query head. `cover` has the weight of every line on these rows.
  void choose(const sampled_attention& seen, line_cover& cover, line_set& lines) const {
    cover.begin(seen);
    cover.add_forced(local, 0);
    std::vector<float> weights;
    for (index_t slot = 0; slot < seen.slots(); ++slot) weights.push_back(float(cover.weight(cover.vertical(slot))));
    std::vector<index_t> best(std::size_t(std::min(columns, seen.slots())));
    top_k_scratch scratch;
    top_k(weights.data(), seen.slots(), index_t(best.size()), best.data(), scratch);
    for (const index_t slot : best) cover.add(cover.vertical(slot));
    cover.write(lines);
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("local", self.local, value_range{1, max_tokens}, "newest positions that a row attends");
    visit("columns", self.columns, value_range{0, max_tokens}, "keys that all rows attend");
  }
};

static_assert(check_prefill<last_row_columns>());
// [prefill]

using sparse_prompts = recipe<retain_all, dense<bf16, 64>, retrieve_all, dense_decode, once, last_row_columns>;
tessera::cache<sparse_prompts> kv({.layers = 4, .q_heads = 4, .kv_heads = 2}, sparse_prompts{},
                                  std::make_shared<cpu::executor>(1));
