// Compiles: the selector of docs/how_to/add_a_selector.md.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>

using namespace tessera;

// [selector]
/// Chooses the tail and the blocks of `block` slots that hold the best tokens, `keep` tokens in all: of the last block that is
/// taken, the first ones.
/// Ties     to the lower block.   Cost   O(n) for each block that is taken.
struct best_blocks {
  static constexpr const char* name = "best_blocks";
  using unit = block_unit;

  index_t block = 4;

  /// Strictly ascending slots into `out`, min(keep, n) of them. Runs on the host, and on a device by one thread for each head.
  TESSERA_HD index_t choose(const float* scores, index_t n, index_t tail, index_t keep, index_t* out) const {
    keep = keep < 0 ? 0 : (keep < n ? keep : n);
    tail = tail < 0 ? 0 : (tail < keep ? tail : keep);
    const index_t candidates = n - tail, blocks = ceil_div(candidates, block);
    const auto length = [&](index_t b) { return b + 1 < blocks ? block : candidates - b * block; };
    const auto best = [&](index_t b) {
      float top = -infinity;  // NaN ranks last: it is above nothing
      for (index_t i = b * block; i < b * block + length(b); ++i) top = scores[i] > top ? scores[i] : top;
      return top;
    };
    const auto before = [&](index_t a, index_t b) { return best(a) > best(b) || (best(a) == best(b) && a < b); };
    // Block after block in order of rank, until the room is used up: `last` is the one that uses it up.
    index_t last = -1, room = keep - tail, of_last = 0;
    while (room > 0) {
      index_t next = -1;
      for (index_t b = 0; b < blocks; ++b) {
        if ((last < 0 || before(last, b)) && (next < 0 || before(b, next))) next = b;
      }
      last = next;
      of_last = room < length(last) ? room : length(last);
      room -= of_last;
    }
    index_t count = 0;
    for (index_t b = 0; b < blocks && last >= 0; ++b) {
      const index_t taken = b == last ? of_last : (before(b, last) ? length(b) : 0);
      for (index_t i = 0; i < taken; ++i) out[count++] = b * block + i;
    }
    for (index_t slot = candidates; slot < n; ++slot) out[count++] = slot;
    return count;
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("block", self.block, value_range{1, max_tokens}, "consecutive tokens that are chosen together");
  }
};

static_assert(check_selector<best_blocks>());
static_assert(check_device_selector<best_blocks>());
// [selector]

using covering =
    recipe<retain<observation_window, uniform, best_blocks>, dense<bf16, 64>, retrieve_all, dense_decode, once>;
tessera::cache<covering> kv({.layers = 4, .q_heads = 4, .kv_heads = 2}, covering{}, std::make_shared<cpu::executor>(1));
