// Random packed sequences on the device, and what their planes hold, read off by the host's own unpacking.
#pragma once

#include <memory>
#include <utility>

#include "backend/cuda/device.hpp"
#include "tessera/backend/cuda/store/packed/detail/bases/find_bases.cuh"
#include "tessera/backend/cuda/store/packed/detail/encode_rows.cuh"
#include "tessera/backend/cuda/store/packed/segment_memory.cuh"

namespace gpu_test {

using numbers = std::vector<double>;
constexpr auto as_bf16 = packed_element::bf16, as_fp16 = packed_element::fp16, as_fp8 = packed_element::fp8,
               as_int4 = packed_element::int4;

inline packed_format format_of(packed_element element, index_t channels, index_t group, index_t kept,
                               bool own_bits = true) {
  return {element, channels, group, kept, own_bits};
}

/// Random rows [count, dim] whose energy gathers in few directions, as keys' does: channel c of a mixed basis shrinks
/// with c.
template <class T>
std::vector<T> gathered_rows(std::size_t count, int dim) {
  const auto directions = normal<float>(std::size_t(dim) * std::size_t(dim));
  std::vector<T> rows(count * std::size_t(dim));
  std::vector<float> row(static_cast<std::size_t>(dim));
  for (std::size_t i = 0; i < count; ++i) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (int c = 0; c < 8; ++c) {
      const float x = std::normal_distribution<float>(0, 1.0f / float(1 + c))(rng());
      for (int d = 0; d < dim; ++d) row[std::size_t(d)] += x * directions[std::size_t(c * dim + d)];
    }
    for (int d = 0; d < dim; ++d) {
      rows[i * std::size_t(dim) + std::size_t(d)] =
          T(row[std::size_t(d)] * 0.5f + std::normal_distribution<float>(0, 0.1f)(rng()));
    }
  }
  return rows;
}

/// Whole rows of a batch on the device, [sequences, kv_heads, capacity, dim].
template <class T, int D, int Dv>
struct whole_rows {
  using view_type = kv_view<const T, D, contiguous, Dv>;
  index_t sequences, heads, capacity;
  std::vector<T> k, v;
  std::vector<index_t> lengths;  // [sequences]
  buffer<T> d_k, d_v;
  buffer<index_t> d_lengths;
  whole_rows(index_t sequences_, index_t heads_, const std::vector<index_t>& lengths_)
      : sequences(sequences_),
        heads(heads_),
        capacity(std::max(1, *std::max_element(lengths_.begin(), lengths_.end()))),
        k(gathered_rows<T>(rows(), D)),
        v(gathered_rows<T>(rows(), Dv)),
        lengths(lengths_),
        d_k(k),
        d_v(v),
        d_lengths(lengths_) {}
  std::size_t rows() const { return std::size_t(sequences * heads) * std::size_t(capacity); }
  const T* key(index_t sequence, index_t head, index_t slot) const {
    return k.data() + ((offset_t(sequence) * heads + head) * capacity + slot) * D;
  }
  const T* value(index_t sequence, index_t head, index_t slot) const {
    return v.data() + ((offset_t(sequence) * heads + head) * capacity + slot) * Dv;
  }
  view_type view() const {
    view_type made;
    made.k = d_k.data, made.v = d_v.data;
    made.k_strides = {offset_t(heads) * capacity * D, offset_t(capacity) * D, D, 1};
    made.v_strides = {offset_t(heads) * capacity * Dv, offset_t(capacity) * Dv, Dv, 1};
    made.sequences = sequences, made.kv_heads = heads;
    made.lengths = d_lengths.data, made.length_strides = {1, 0};
    return made;
  }
};

inline std::string name_of(const packed_format& format) {
  return "element " + std::to_string(int(format.element)) + " channels " + std::to_string(format.channels) + " group " +
         std::to_string(format.group) + " kept " + std::to_string(format.stored_channels) + " own bits " +
         std::to_string(format.own_bits);
}

/// One row of a plane, unpacked by core/packed_row.hpp: [channels], and its bits.
struct unpacked_row {
  numbers values;
  std::vector<bool> stays;  // by channel
  float scale = 1;
};

class downloaded_vectors {
 public:
  downloaded_vectors(const cuda::packed_vectors& from, index_t heads) : from_(from) {
    const std::size_t rows = std::size_t(heads) * std::size_t(from.capacity);
    values_ = cuda::downloaded(from.values, rows * std::size_t(cuda::value_stride(from.format.value_bytes())));
    const std::size_t words = std::size_t(cuda::bit_words(from.format));
    bits_ = from.format.own_bits ? cuda::downloaded<std::uint32_t>(from.bits, rows * words)
                                 : cuda::downloaded<std::uint32_t>(from.set, std::size_t(heads) * words);
    if (from.scales) scales_ = cuda::downloaded<float>(from.scales, rows);
  }
  unpacked_row row(index_t head, index_t i) const {
    const packed_format& format = from_.format;
    const std::size_t at = std::size_t(head) * std::size_t(from_.capacity) + std::size_t(i),
                      words = std::size_t(cuda::bit_words(format));
    const auto* bits =
        reinterpret_cast<const std::uint8_t*>(bits_.data() + (format.own_bits ? at : std::size_t(head)) * words);
    unpacked_row made;
    made.scale = scales_.empty() ? 1.0f : scales_[at];
    std::vector<float> row(std::size_t(format.channels));
    unpack_row(format, bits, values_.data() + at * std::size_t(cuda::value_stride(format.value_bytes())), made.scale,
               row.data());
    made.values.assign(row.begin(), row.end());
    for (index_t c = 0; c < format.channels; ++c) made.stays.push_back(has_bit(bits, c / format.group));
    return made;
  }

 private:
  cuda::packed_vectors from_;
  std::vector<std::byte> values_;
  std::vector<std::uint32_t> bits_;
  std::vector<float> scales_;
};

/// x [dim] in a basis [channels, dim], or as it is.
template <class X>
numbers turned(const X* x, const float* basis, index_t channels, int dim) {
  numbers result(std::size_t(channels), 0.0);
  for (index_t c = 0; c < channels; ++c) {
    if (!basis) {
      result[std::size_t(c)] = double(float(x[c]));
      continue;
    }
    for (int d = 0; d < dim; ++d) result[std::size_t(c)] += double(basis[offset_t(c) * dim + d]) * double(float(x[d]));
  }
  return result;
}
inline numbers turned_back(const numbers& x, const float* basis, int dim) {
  if (!basis) return x;
  numbers result(std::size_t(dim), 0.0);
  for (std::size_t c = 0; c < x.size(); ++c) {
    for (int d = 0; d < dim; ++d) result[std::size_t(d)] += x[c] * double(basis[c * std::size_t(dim) + std::size_t(d)]);
  }
  return result;
}

/// How one segment is to be packed.
struct segment_plan {
  packed_format k, v;
  index_t block = 8, rows = 0;
  bool rotated = true;
};

/// Segments of a batch, packed on the device of random rows. All sequences have segments of the same plans, and
/// `counts` of them.
template <class T, int D, int Dv = D>
class packed_batch {
 public:
  using whole = whole_rows<T, D, Dv>;
  using view_type = cuda::packed_view<typename whole::view_type>;

  packed_batch(index_t sequences, index_t heads, std::vector<segment_plan> plans, const std::vector<index_t>& counts,
               const std::vector<index_t>& tails)
      : heads_(heads), plans_(std::move(plans)), counts_(counts), tails_(sequences, heads, tails), d_counts_(counts) {
    const auto device = cuda::device_info::current();
    for (index_t b = 0; b < sequences; ++b) {
      for (std::size_t s = 0; s < plans_.size(); ++s) segments_.push_back(make(plans_[s], device));
    }
    std::vector<cuda::device_segment> table;
    for (const auto& one : segments_) table.push_back(one->on_device);
    d_table_ = std::make_unique<buffer<cuda::device_segment>>(table);
  }

  view_type view() const {
    view_type made;
    made.segments = d_table_->data;
    made.counts = d_counts_.data;
    made.max_segments = index_t(plans_.size());
    made.whole = tails_.view();
    return made;
  }
  index_t sequences() const { return index_t(counts_.size()); }
  index_t heads() const { return heads_; }
  index_t segments(index_t sequence) const { return counts_[std::size_t(sequence)]; }
  const segment_plan& plan(index_t s) const { return plans_[std::size_t(s)]; }
  const whole& tails() const { return tails_; }
  index_t packed(index_t sequence) const {
    index_t rows = 0;
    for (index_t s = 0; s < segments(sequence); ++s) rows += plan(s).rows;
    return rows;
  }

  /// A stored row in the engine's basis; and of a block's mean in its segment's.
  numbers key(index_t sequence, index_t head, index_t slot) const {
    const auto [s, row] = find(sequence, slot);
    if (s < 0) return raw(tails_.key(sequence, head, row), D);
    const made_segment& one = at(sequence, s);
    return turned_back(one.k->row(head, row).values, one.k_basis_of(head), D);
  }
  numbers value(index_t sequence, index_t head, index_t slot) const {
    const auto [s, row] = find(sequence, slot);
    if (s < 0) return raw(tails_.value(sequence, head, row), Dv);
    const made_segment& one = at(sequence, s);
    return turned_back(one.v->row(head, row).values, one.v_basis_of(head), Dv);
  }
  unpacked_row mean(index_t sequence, index_t s, index_t head, index_t block) const {
    return at(sequence, s).means->row(head, block);
  }
  const float* k_basis(index_t sequence, index_t s, index_t head) const { return at(sequence, s).k_basis_of(head); }

 private:
  struct made_segment {
    cuda::segment_memory memory;
    cuda::device_segment on_device;
    std::vector<float> k_bases, v_bases;
    index_t k_channels, v_channels;
    std::unique_ptr<buffer<float>> d_k, d_v;
    std::unique_ptr<buffer<std::uint32_t>> k_set, v_set;
    std::unique_ptr<downloaded_vectors> k, v, means;
    const float* k_basis_of(index_t head) const {
      return k_bases.empty() ? nullptr : k_bases.data() + offset_t(head) * k_channels * D;
    }
    const float* v_basis_of(index_t head) const {
      return v_bases.empty() ? nullptr : v_bases.data() + offset_t(head) * v_channels * Dv;
    }
  };
  template <class X>
  static numbers raw(const X* x, int dim) {
    numbers row;
    for (int d = 0; d < dim; ++d) row.push_back(double(float(x[d])));
    return row;
  }
  static std::unique_ptr<buffer<std::uint32_t>> random_set(const packed_format& format, index_t heads) {
    if (format.own_bits) return nullptr;
    const index_t words = cuda::bit_words(format);
    std::vector<std::uint32_t> bits(std::size_t(heads * words), 0u);
    for (index_t h = 0; h < heads; ++h) {
      std::vector<index_t> groups(std::size_t(format.groups()));
      std::iota(groups.begin(), groups.end(), 0);
      std::shuffle(groups.begin(), groups.end(), rng());
      for (index_t i = 0; i < format.stored_channels / format.group; ++i) {
        set_bit(reinterpret_cast<std::uint8_t*>(bits.data() + h * words), groups[std::size_t(i)]);
      }
    }
    return std::make_unique<buffer<std::uint32_t>>(bits);
  }
  /// Orthonormal rows [heads, channels, dim].
  static std::vector<float> random_bases(index_t heads, index_t channels, int dim) {
    std::vector<float> all;
    for (index_t h = 0; h < heads; ++h) {
      std::vector<numbers> rows;
      for (index_t c = 0; c < channels; ++c) {
        numbers row(static_cast<std::size_t>(dim));
        for (double& x : row) x = std::normal_distribution<double>()(rng());
        for (const numbers& before : rows) {
          const double along = std::inner_product(row.begin(), row.end(), before.begin(), 0.0);
          for (std::size_t d = 0; d < row.size(); ++d) row[d] -= along * before[d];
        }
        const double length = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
        for (double& x : row) all.push_back(float(x /= length));
        rows.push_back(std::move(row));
      }
    }
    return all;
  }
  void find_bases_of(const view_type& view, const segment_plan& plan, made_segment& made,
                     const cuda::device_info& device) const {
    using moments = cuda::second_moments<view_type>;
    buffer<unsigned char> work(moments::workspace_bytes(heads_, plan.rows));
    const float* sums = moments().run(view, 0, plan.rows, work.data, nullptr);
    buffer<index_t> bad(static_cast<std::size_t>(heads_));
    const cuda::find_bases find_k(D, device), find_v(Dv, device);
    buffer<unsigned char> k_work(find_k.workspace_bytes(heads_)), v_work(find_v.workspace_bytes(heads_));
    find_k.run(sums, offset_t(moments::lane_floats), heads_, plan.k.channels, made.d_k->data, bad.data, k_work.data,
               nullptr);
    find_v.run(sums + D * D, offset_t(moments::lane_floats), heads_, plan.v.channels, made.d_v->data, bad.data,
               v_work.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "bases");
  }
  std::unique_ptr<made_segment> make(const segment_plan& plan, const cuda::device_info& device) const {
    auto made = std::make_unique<made_segment>(
        made_segment{cuda::segment_memory(plan.k, plan.v, plan.block, heads_, plan.rows + 5),
                     {},
                     {},
                     {},
                     plan.k.channels,
                     plan.v.channels,
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {}});
    const whole rows(1, heads_, {plan.rows});
    view_type view;
    view.whole = rows.view();
    if (plan.rotated) {
      made->d_k = std::make_unique<buffer<float>>(std::size_t(heads_ * plan.k.channels) * D);
      made->d_v = std::make_unique<buffer<float>>(std::size_t(heads_ * plan.v.channels) * Dv);
      if (scaled(10) < 10) {  // sanitizers take minutes for the rotations that find bases
        made->d_k->set(random_bases(heads_, plan.k.channels, D));
        made->d_v->set(random_bases(heads_, plan.v.channels, Dv));
      } else {
        find_bases_of(view, plan, *made, device);
      }
      made->k_bases = made->d_k->get(), made->v_bases = made->d_v->get();
    }
    made->k_set = random_set(plan.k, heads_), made->v_set = random_set(plan.v, heads_);
    made->on_device =
        made->memory.segment(made->d_k ? made->d_k->data : nullptr, made->d_v ? made->d_v->data : nullptr,
                             made->k_set ? made->k_set->data : nullptr, made->v_set ? made->v_set->data : nullptr);
    buffer<cuda::device_segment> table(std::vector<cuda::device_segment>{made->on_device});
    buffer<index_t> one(std::vector<index_t>{1});
    view.segments = table.data, view.counts = one.data, view.max_segments = 1;
    cuda::encode_problem<view_type> problem;
    problem.view = view;
    problem.count = plan.rows;
    cuda::encode_rows<view_type>(plan.block).run(problem, nullptr);
    cuda::check(cudaDeviceSynchronize(), "encoding");
    made->k = std::make_unique<downloaded_vectors>(made->on_device.k, heads_);
    made->v = std::make_unique<downloaded_vectors>(made->on_device.v, heads_);
    if (plan.block > 0) made->means = std::make_unique<downloaded_vectors>(made->on_device.means, heads_);
    return made;
  }
  std::pair<index_t, index_t> find(index_t sequence, index_t slot) const {
    for (index_t s = 0; s < segments(sequence); ++s) {
      if (slot < plan(s).rows) return {s, slot};
      slot -= plan(s).rows;
    }
    return {-1, slot};
  }
  const made_segment& at(index_t sequence, index_t s) const {
    return *segments_[std::size_t(sequence) * plans_.size() + std::size_t(s)];
  }

  index_t heads_;
  std::vector<segment_plan> plans_;
  std::vector<index_t> counts_;
  whole tails_;
  buffer<index_t> d_counts_;
  std::vector<std::unique_ptr<made_segment>> segments_;
  std::unique_ptr<buffer<cuda::device_segment>> d_table_;
};

}  // namespace gpu_test
