// Making segments on the CPU: a basis of the rows that are packed, and the rows in it.
#pragma once

#include <memory>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/rotation.hpp"
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
  template <class Channels>
  void find_basis(const Channels& channels, const packed_format& format, const std::string& of, float* basis) {
    find_rotation(second_moment(count_, D, load_), D, format.channels, of, basis);
    if constexpr (vector_channels<Channels>) {
      if (format.group > 1) order_channels(channels, format, basis);
    }
  }

  /// Calls take(i, row, given) for rows first, ... in the basis; row [D], 0 behind the channels, given [D] as it was
  /// loaded.
  template <class Take>
  void for_each_rotated(const float* basis, const packed_format& format, const Take& take) {
    for (index_t first = 0; first < count_; first += packed_at_once) {
      const int rows = int((std::min<index_t>)(packed_at_once, count_ - first));
      for (int r = 0; r < rows; ++r) load_(first + r, given_.data() + r * D);
      rotate_rows<D>(given_.data(), rows, basis, format.channels, turned_.data(), held_.data());
      for (int r = 0; r < rows; ++r) take(first + r, held_.data() + r * D, given_.data() + r * D);
    }
  }

 private:
  template <class Channels>
  void order_channels(const Channels& channels, const packed_format& format, float* basis) {
    const host_vector<index_t> order = order_of_channels(channels, format, count_, [&](index_t i) {
      load_(i, given_.data());
      rotate_rows<D>(given_.data(), 1, basis, format.channels, turned_.data(), held_.data());
      return held_.data();
    });
    const host_vector<float> before(basis, basis + offset_t(format.channels) * D);
    for (index_t c = 0; c < format.channels; ++c) {
      std::copy_n(before.data() + offset_t(order[std::size_t(c)]) * D, D, basis + offset_t(c) * D);
    }
  }

  index_t count_;
  const Load& load_;
  host_vector<float> given_ = host_vector<float>(packed_at_once * D), held_ = given_,
                     turned_ = host_vector<float>(D * D);
};

template <int D, class Load>
side_packer<D, Load> pack_side(index_t count, const Load& load) {
  return {count, load};
}

}  // namespace detail

/// Makes segments of rows that `load_key` and `load_value` give: of the whole rows of a packing layout's view, for one.
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

  row_packer(const rows_type& rows, index_t block, const From& from, index_t layer, executor& workers)
      : rows_(rows),
        format_{rows.key_format(), rows.value_format(), block},
        from_(from),
        layer_(layer),
        workers_(workers) {}

  /// A segment of these rows in a basis of their own.
  /// Errors   a second moment with NaN or infinity: tessera::error.
  std::shared_ptr<segment_type> in_own_basis(const row_lists& lists, const query_squares& queries) const {
    auto basis = std::make_shared<segment_basis>();
    const index_t heads = from_.kv_heads;
    if constexpr (rows_type::basis_type::rotates) {
      basis->k.resize(std::size_t(heads) * std::size_t(format_.k.channels) * k_dim);
      basis->v.resize(std::size_t(heads) * std::size_t(format_.v.channels) * v_dim);
    }
    if (!key_bits) basis->k_set.resize(std::size_t(heads * format_.k.set_bytes()));
    if (!value_bits) basis->v_set.resize(std::size_t(heads * format_.v.set_bytes()));
    workers_.for_each(heads, [&](index_t h, int) {
      const auto keys = load_keys_of(lists, h);
      const auto values = load_values_of(lists, h);
      const index_t count = index_t(lists[std::size_t(h)].size());
      const std::string of = " of layer " + std::to_string(layer_) + ", kv_head " + std::to_string(h);
      if constexpr (rows_type::basis_type::rotates) {
        detail::pack_side<k_dim>(count, keys)
            .find_basis(rows_.key, format_.k, "keys" + of, basis->k.data() + offset_t(h) * format_.k.channels * k_dim);
        detail::pack_side<v_dim>(count, values)
            .find_basis(rows_.value, format_.v, "values" + of,
                        basis->v.data() + offset_t(h) * format_.v.channels * v_dim);
      }
      const double* asked = queries.empty() ? nullptr : queries.data() + offset_t(h) * k_dim;
      if constexpr (!key_bits) {
        choose_set<k_dim>(rows_.key, format_.k, h, keys, count, asked, basis->k, basis->k_set);
      }
      if constexpr (!value_bits) {
        choose_set<v_dim>(rows_.value, format_.v, h, values, count, nullptr, basis->v, basis->v_set);
      }
    });
    auto made = std::make_shared<segment_type>(format_, std::move(basis), heads);
    add(lists, *made);
    return made;
  }

  /// A segment of these rows in another one's basis and format.
  std::shared_ptr<segment_type> as_in(const segment_type& other, const row_lists& lists) const {
    auto made = std::make_shared<segment_type>(other.format, other.basis, from_.kv_heads);
    add(lists, *made);
    return made;
  }

  /// Makes the means of a head's blocks anew from `first` on, of what is stored of their rows.
  static void mean_again(const rows_type& rows, segment_type& of, index_t head, index_t first) {
    alignas(64) float row[k_dim];
    float sum[k_dim] = {};
    const index_t count = of.lengths[std::size_t(head)];
    for (index_t i = first * of.format.block; i < count; ++i) {
      of.unpack_key(head, i, row);
      add_to_mean(rows.key, of, head, i, count, row, sum);
    }
  }

 private:
  auto load_keys_of(const row_lists& lists, index_t head) const {
    return [this, &lists, head](index_t i, float* to) {
      load_key(from_, 0, head, lists[std::size_t(head)][std::size_t(i)], to);
    };
  }
  auto load_values_of(const row_lists& lists, index_t head) const {
    return [this, &lists, head](index_t i, float* to) {
      load_value(from_, 0, head, lists[std::size_t(head)][std::size_t(i)], to);
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
  void add(const row_lists& lists, segment_type& to) const {
    host_vector<index_t> counts;
    for (const auto& list : lists) counts.push_back(index_t(list.size()));
    to.rows.reserve(to.lengths, counts, false);
    to.means.reserve(to.lengths, to.blocks_of(counts), false);
    workers_.for_each(from_.kv_heads, [&](index_t h, int) {
      const index_t count = counts[std::size_t(h)];
      float sum[k_dim] = {};
      const auto keys = load_keys_of(lists, h);
      detail::pack_side<k_dim>(count, keys)
          .for_each_rotated(to.k_basis(h, k_dim), to.format.k, [&](index_t i, const float* row, const float* given) {
            const std::uint8_t* bits = pack<k_values>(rows_.key, to.format.k, row, h, i, to.rows, to.basis->k_set);
            note_loss(to.format.k, row, given, k_dim, bits, to.losses[std::size_t(h)]);
            if (to.format.block > 0) add_to_mean(rows_.key, to, h, i, count, row, sum);
          });
      const auto values = load_values_of(lists, h);
      detail::pack_side<v_dim>(count, values)
          .for_each_rotated(to.v_basis(h, v_dim), to.format.v, [&](index_t i, const float* row, const float* given) {
            const std::uint8_t* bits = pack<v_values>(rows_.value, to.format.v, row, h, i, to.rows, to.basis->v_set);
            note_loss(to.format.v, row, given, v_dim, bits, to.losses[std::size_t(h)]);
          });
    });
    to.lengths = counts;
  }

  /// The mean key of a block is that of rows before anything of them was left out; then it is packed as they are.
  template <class Channels>
  static void add_to_mean(const Channels& channels, segment_type& to, index_t head, index_t i, index_t count,
                          const float* row, float* sum) {
    for (index_t c = 0; c < to.format.k.channels; ++c) sum[c] += row[c];
    const index_t in_block = i % to.format.block + 1;
    if (in_block < to.format.block && i + 1 < count) return;
    for (index_t c = 0; c < to.format.k.channels; ++c) sum[c] /= float(in_block);
    pack<k_values>(channels, to.format.k, sum, head, i / to.format.block, to.means, to.basis->k_set);
    std::fill_n(sum, k_dim, 0.0f);
  }

  /// Returns the row's bits, where they lie now.
  template <packed_plane Values, class Channels, class Memory>
  static const std::uint8_t* pack(const Channels& channels, const packed_format& format, const float* row, index_t head,
                                  index_t place, Memory& to, const host_vector<std::uint8_t>& set) {
    constexpr auto bits_plane = Values == k_values ? k_bits : v_bits;
    constexpr auto scale_plane = Values == k_values ? k_scales : v_scales;
    const std::uint8_t* bits = nullptr;
    if constexpr (vector_channels<Channels>) {
      auto* own = reinterpret_cast<std::uint8_t*>(to.at(bits_plane, head, place));
      channels.choose(row, format, own);
      bits = own;
    } else {
      bits = set.data() + offset_t(head) * format.set_bytes();  // one for all vectors of a head
    }
    const float scale = pack_row(format, row, bits, to.at(Values, head, place));
    if (format.scaled()) tessera::detail::store_value<float>(to.at(scale_plane, head, place), 0, scale);
    return bits;
  }

  /// Half of what a vector loses: a token's loss is the mean of K's and V's.
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
  const From& from_;
  index_t layer_;
  executor& workers_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
