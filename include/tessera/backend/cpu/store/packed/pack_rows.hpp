// Making segments on the CPU: a basis of the rows that are packed, and the rows in it.
#pragma once

#include <memory>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/rotation.hpp"
#include "../../../../runtime/strategy.hpp"
#include "packed_view.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Mean squares of a prompt's last queries, [kv_heads, k_dim]; empty where none was seen.
using query_squares = host_vector<double>;

namespace detail {

constexpr int packed_at_once = 64;

/// Rows of one head, K or V, that become a segment: `load(i, to)` gives row i of `count` as fp32.
template <int D, class Load>
class side_packer {
 public:
  side_packer(index_t count, const Load& load) : count_(count), load_(load) {}

  /// The basis of the rows: [channels, D] into `basis`.
  void find_basis(index_t channels, const std::string& of, float* basis) {
    find_rotation(second_moment(count_, D, load_), D, channels, of, basis);
    spread_channels(basis, channels, D);
  }
  /// Orders a basis for the groups of a format.
  template <class Channels>
  void order_channels(const Channels& channels, const packed_format& format, float* basis) {
    if constexpr (vector_channels<Channels>) {
      if (format.group == 1) return;
      const host_vector<index_t> order = order_of_channels(channels, format, count_, [&](index_t i) {
        load_(i, given_.data());
        rotate_rows<D>(given_.data(), 1, basis, format.channels, turned_.data(), rotated_.data());
        return rotated_.data();
      });
      const host_vector<float> unordered(basis, basis + offset_t(format.channels) * D);
      for (index_t c = 0; c < format.channels; ++c) {
        std::copy_n(unordered.data() + offset_t(order[std::size_t(c)]) * D, D, basis + offset_t(c) * D);
      }
    }
  }

  /// Calls visit(i, row, given) for every row: row [D] in the basis, with 0 behind the channels; given [D] as loaded.
  template <class Visit>
  void for_each_rotated(const float* basis, const packed_format& format, const Visit& visit) {
    for (index_t first = 0; first < count_; first += packed_at_once) {
      const int rows = int((std::min<index_t>)(packed_at_once, count_ - first));
      for (int r = 0; r < rows; ++r) load_(first + r, given_.data() + r * D);
      rotate_rows<D>(given_.data(), rows, basis, format.channels, turned_.data(), rotated_.data());
      for (int r = 0; r < rows; ++r) visit(first + r, rotated_.data() + r * D, given_.data() + r * D);
    }
  }

 private:
  index_t count_;
  const Load& load_;
  host_vector<float> given_ = host_vector<float>(packed_at_once * D), rotated_ = given_,
                     turned_ = host_vector<float>(D * D);
};

template <int D, class Load>
side_packer<D, Load> pack_side(index_t count, const Load& load) {
  return {count, load};
}

}  // namespace detail

/// Makes segments of rows that `load_key` and `load_value` read, such as the whole rows of a packing layout's view.
template <packing_layout Layout, class From = typename packed_view<Layout>::whole_view>
class row_packer {
  using rows_type = typename Layout::rows_type;
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  static constexpr bool key_bits = vector_channels<typename rows_type::key_channels>;
  static constexpr bool value_bits = vector_channels<typename rows_type::value_channels>;

 public:
  using segment_type = packed_segment<typename Layout::placement_type>;
  /// Whole rows of every kv_head, ascending.
  using row_lists = host_vector<host_vector<index_t>>;

  row_packer(const rows_type& rows, index_t block, const From& source, index_t layer, executor& workers)
      : rows_(rows),
        format_{rows.key_format(), rows.value_format(), block},
        source_(source),
        layer_(layer),
        workers_(workers) {}

  /// A segment of these rows in a basis of their own; where strategies are searched, by the one that a search finds.
  /// Errors   a second moment with NaN or infinity: tessera::error.
  std::shared_ptr<segment_type> in_own_basis(const row_lists& lists, const query_squares& queries) const {
    if constexpr (searching_layout<Layout>) {
      if (rows_.searches()) return by_searched_strategy(lists, [] { return false; });
    }
    auto basis = std::make_shared<segment_basis>();
    resize(*basis);
    workers_.for_each(source_.kv_heads, [&](index_t h, int) {
      find_bases(lists, h, *basis);
      finish_basis(lists, h, queries.empty() ? nullptr : queries.data() + offset_t(h) * k_dim, *basis);
    });
    return in_basis(std::move(basis), lists);
  }

  /// A segment of these rows by a strategy that is searched for them; null where `stops()` says, between two heads,
  /// that nobody waits for it. Errors as in_own_basis.
  template <class Stops>
  std::shared_ptr<segment_type> by_searched_strategy(const row_lists& lists, const Stops& stops) const
      requires searching_layout<Layout> {
    auto basis = std::make_shared<segment_basis>();
    resize(*basis);
    const index_t heads = source_.kv_heads;
    using search = strategy_search<typename rows_type::key_channels>;
    host_vector<search> of_heads(std::size_t(heads), search(rows_.key));
    workers_.for_each(heads, [&](index_t h, int) {
      if (stops()) return;
      find_bases(lists, h, *basis);
      const auto keys = load_keys_of(lists, h);
      const auto values = load_values_of(lists, h);
      const index_t count = index_t(lists[std::size_t(h)].size());
      search& own = of_heads[std::size_t(h)];
      own.add(count, k_dim, format_.k.channels, k_basis(*basis, h), keys);
      own.add(count, v_dim, format_.v.channels, v_basis(*basis, h), values);
      own.add_blocks(count, k_dim, keys);
    });
    if (stops()) return nullptr;
    for (index_t h = 1; h < heads; ++h) of_heads.front().add(of_heads[std::size_t(h)]);
    const segment_strategy best =
        of_heads.front().best(rows_.strategy.channel_loss, rows_.strategy.block_spread, rows_.searched_block_unit());
    const rows_type own = rows_.by_strategy(best);
    const row_packer packer(own, format_.block > 0 ? best.block : 0, source_, layer_, workers_);
    workers_.for_each(heads, [&](index_t h, int) { packer.finish_basis(lists, h, nullptr, *basis); });
    return packer.in_basis(std::move(basis), lists);
  }

  /// A segment of these rows in another segment's basis and format.
  std::shared_ptr<segment_type> as_in(const segment_type& other, const row_lists& lists) const {
    auto made = std::make_shared<segment_type>(other.format, other.basis, source_.kv_heads);
    add(lists, *made);
    return made;
  }

  /// Computes the means of a head's blocks from `first` on, from the stored elements of their rows.
  static void recompute_means(const rows_type& rows, segment_type& segment, index_t head, index_t first) {
    alignas(64) float row[k_dim];
    float sum[k_dim] = {};
    const index_t count = segment.lengths[std::size_t(head)];
    for (index_t i = first * segment.format.block; i < count; ++i) {
      segment.unpack_key(head, i, row);
      add_to_mean(rows.key, segment, head, i, count, row, sum);
    }
  }

 private:
  void resize(segment_basis& basis) const {
    const index_t heads = source_.kv_heads;
    if constexpr (rows_type::basis_type::rotates) {
      basis.k.resize(std::size_t(heads) * std::size_t(format_.k.channels) * k_dim);
      basis.v.resize(std::size_t(heads) * std::size_t(format_.v.channels) * v_dim);
    }
    if (!key_bits) basis.k_set.resize(std::size_t(heads * format_.k.set_bytes()));
    if (!value_bits) basis.v_set.resize(std::size_t(heads * format_.v.set_bytes()));
  }
  float* k_basis(segment_basis& basis, index_t head) const {
    return basis.k.data() + offset_t(head) * format_.k.channels * k_dim;
  }
  float* v_basis(segment_basis& basis, index_t head) const {
    return basis.v.data() + offset_t(head) * format_.v.channels * v_dim;
  }
  /// The bases of one head, in no order for groups yet.
  void find_bases(const row_lists& lists, index_t h, segment_basis& basis) const {
    if constexpr (rows_type::basis_type::rotates) {
      const auto keys = load_keys_of(lists, h);
      const auto values = load_values_of(lists, h);
      const index_t count = index_t(lists[std::size_t(h)].size());
      const std::string of = " of layer " + std::to_string(layer_) + ", kv_head " + std::to_string(h);
      detail::pack_side<k_dim>(count, keys).find_basis(format_.k.channels, "keys" + of, k_basis(basis, h));
      detail::pack_side<v_dim>(count, values).find_basis(format_.v.channels, "values" + of, v_basis(basis, h));
    }
  }
  /// Orders the channels of one head for the groups of the format, and chooses the sets that its rows share.
  void finish_basis(const row_lists& lists, index_t h, const double* squares, segment_basis& basis) const {
    const auto keys = load_keys_of(lists, h);
    const auto values = load_values_of(lists, h);
    const index_t count = index_t(lists[std::size_t(h)].size());
    if constexpr (rows_type::basis_type::rotates) {
      detail::pack_side<k_dim>(count, keys).order_channels(rows_.key, format_.k, k_basis(basis, h));
      detail::pack_side<v_dim>(count, values).order_channels(rows_.value, format_.v, v_basis(basis, h));
    }
    if constexpr (!key_bits) choose_set<k_dim>(rows_.key, format_.k, h, keys, count, squares, basis.k, basis.k_set);
    if constexpr (!value_bits)
      choose_set<v_dim>(rows_.value, format_.v, h, values, count, nullptr, basis.v, basis.v_set);
  }
  std::shared_ptr<segment_type> in_basis(std::shared_ptr<segment_basis> basis, const row_lists& lists) const {
    auto made = std::make_shared<segment_type>(format_, std::move(basis), source_.kv_heads);
    add(lists, *made);
    return made;
  }
  auto load_keys_of(const row_lists& lists, index_t head) const {
    return [this, &lists, head](index_t i, float* row) {
      load_key(source_, 0, head, lists[std::size_t(head)][std::size_t(i)], row);
    };
  }
  auto load_values_of(const row_lists& lists, index_t head) const {
    return [this, &lists, head](index_t i, float* row) {
      load_value(source_, 0, head, lists[std::size_t(head)][std::size_t(i)], row);
    };
  }

  template <int D, class Channels, class Load>
  static void choose_set(const Channels& channels, const packed_format& format, index_t head, const Load& load,
                         index_t count, const double* queries, const host_vector<float>& basis,
                         host_vector<std::uint8_t>& set) {
    host_vector<double> squares(static_cast<std::size_t>(D), 0.0);
    const float* own = basis.empty() ? nullptr : basis.data() + offset_t(head) * format.channels * D;
    detail::pack_side<D>(count, load).for_each_rotated(own, format, [&](index_t, const float* row, const float*) {
      for (index_t c = 0; c < format.channels; ++c) {
        squares[std::size_t(c)] += double(row[c]) * double(row[c]) / double(count);
      }
    });
    channels.choose_for_head(queries, squares.data(), format, set.data() + offset_t(head) * format.set_bytes());
  }

  /// Fills an empty segment.
  void add(const row_lists& lists, segment_type& target) const {
    host_vector<index_t> counts;
    for (const auto& list : lists) counts.push_back(index_t(list.size()));
    target.rows.reserve(target.lengths, counts, false);
    target.means.reserve(target.lengths, target.blocks_of(counts), false);
    workers_.for_each(source_.kv_heads, [&](index_t h, int) {
      const index_t count = counts[std::size_t(h)];
      float sum[k_dim] = {};
      const auto keys = load_keys_of(lists, h);
      detail::pack_side<k_dim>(count, keys)
          .for_each_rotated(
              target.k_basis(h, k_dim), target.format.k, [&](index_t i, const float* row, const float* given) {
                const std::uint8_t* bits =
                    pack<k_values>(rows_.key, target.format.k, row, h, i, target.rows, target.basis->k_set);
                note_loss(target.format.k, row, given, k_dim, bits, target.losses[std::size_t(h)]);
                if (target.format.block > 0) add_to_mean(rows_.key, target, h, i, count, row, sum);
              });
      const auto values = load_values_of(lists, h);
      detail::pack_side<v_dim>(count, values)
          .for_each_rotated(
              target.v_basis(h, v_dim), target.format.v, [&](index_t i, const float* row, const float* given) {
                const std::uint8_t* bits =
                    pack<v_values>(rows_.value, target.format.v, row, h, i, target.rows, target.basis->v_set);
                note_loss(target.format.v, row, given, v_dim, bits, target.losses[std::size_t(h)]);
              });
    });
    target.lengths = counts;
  }

  /// The mean key of a block is the mean of its unpacked rows, which is then packed as they are.
  template <class Channels>
  static void add_to_mean(const Channels& channels, segment_type& target, index_t head, index_t i, index_t count,
                          const float* row, float* sum) {
    for (index_t c = 0; c < target.format.k.channels; ++c) sum[c] += row[c];
    const index_t in_block = i % target.format.block + 1;
    if (in_block < target.format.block && i + 1 < count) return;
    for (index_t c = 0; c < target.format.k.channels; ++c) sum[c] /= float(in_block);
    pack<k_values>(channels, target.format.k, sum, head, i / target.format.block, target.means, target.basis->k_set);
    std::fill_n(sum, k_dim, 0.0f);
  }

  /// Packs a row. Returns the address of its bits.
  template <packed_plane Values, class Channels, class Memory>
  static const std::uint8_t* pack(const Channels& channels, const packed_format& format, const float* row, index_t head,
                                  index_t index, Memory& memory, const host_vector<std::uint8_t>& set) {
    constexpr auto bits_plane = Values == k_values ? k_bits : v_bits;
    constexpr auto scale_plane = Values == k_values ? k_scales : v_scales;
    const std::uint8_t* bits = nullptr;
    if constexpr (vector_channels<Channels>) {
      auto* row_bits = reinterpret_cast<std::uint8_t*>(memory.address(bits_plane, head, index));
      channels.choose(row, format, row_bits);
      bits = row_bits;
    } else {
      bits = set.data() + offset_t(head) * format.set_bytes();  // shared by all vectors of a head
    }
    const float scale = pack_row(format, row, bits, memory.address(Values, head, index));
    if (format.scaled()) tessera::detail::store_value<float>(memory.address(scale_plane, head, index), 0, scale);
    return bits;
  }

  /// Adds half of a vector's loss: the loss of a token is the mean of K's and V's.
  static void note_loss(const packed_format& format, const float* row, const float* given, int dim,
                        const std::uint8_t* bits, double& loss) {
    if constexpr (rows_type::strategy_type::searches) {
      double all = 0, stays = 0;
      for (int d = 0; d < dim; ++d) all += double(given[d]) * double(given[d]);
      tessera::detail::for_each_stored(format, bits,
                                       [&](index_t c, index_t) { stays += double(row[c]) * double(row[c]); });
      loss += 0.5 * (std::max)(0.0, all - stays) / (all + 1e-12);
    }
  }

  const rows_type& rows_;
  segment_format format_;
  const From& source_;
  index_t layer_;
  executor& workers_;
};

/// Rows that `tail` packs, by kv_head: the oldest whole ones of those that stay, among `retained` (null: all). `packed`
/// and `whole`: rows of each head.
template <class Tail>
host_vector<host_vector<index_t>> rows_to_pack(const Tail& tail, const host_vector<index_t>& packed,
                                               const host_vector<index_t>& whole, const selection* retained,
                                               packing_moment when) {
  const bool in_steps = when == packing_moment::step_end;
  host_vector<host_vector<index_t>> due(packed.size(), host_vector<index_t>{});
  for (std::size_t h = 0; h < packed.size(); ++h) {
    host_vector<index_t>& list = due[h];
    if (retained) {
      for (index_t i = 0; i < retained->counts[h]; ++i) {
        if (retained->row(index_t(h))[i] >= packed[h]) list.push_back(retained->row(index_t(h))[i] - packed[h]);
      }
    } else {
      for (index_t i = 0; i < whole[h]; ++i) list.push_back(i);
    }
    const index_t count = index_t(list.size());
    list.resize(std::size_t(in_steps ? tail.packed_after_step(count) : tail.packed_after_prompt(count)));
  }
  return due;
}

/// Keeps these slots of a head of one segment, whose first row is slot `begin`.
template <class Layout>
void keep_of_segment(const typename Layout::rows_type& rows, packed_segment<typename Layout::placement_type>& segment,
                     index_t head, const index_t* slots, index_t count, index_t begin) {
  if (count == segment.lengths[std::size_t(head)]) return;
  index_t first = 0;  // row that moves
  while (first < count && slots[first] - begin == first) ++first;
  for (index_t i = first; i < count; ++i) segment.copy_row(segment, head, slots[i] - begin, i);
  segment.losses[std::size_t(head)] *= double(count) / segment.lengths[std::size_t(head)];
  segment.lengths[std::size_t(head)] = count;
  if (segment.format.block > 0) row_packer<Layout>::recompute_means(rows, segment, head, first / segment.format.block);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
