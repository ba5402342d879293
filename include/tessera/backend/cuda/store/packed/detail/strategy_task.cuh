// A search of strategies beside a cache on the device: what the thread does.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "../../../../../core/host/host_vector.hpp"
#include "../../../../../layout/packed_rows.hpp"
#include "../../../../../runtime/background.hpp"
#include "../../../../../runtime/jacobi.hpp"
#include "../../../../../runtime/strategy.hpp"
#include "rows_before.cuh"
#include "segment_store.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The planes of one segment, one behind the other in one piece of memory, on the host or on the device.
struct segment_image {
  packed_format k, v;
  index_t block, heads, rows;

  index_t blocks() const { return block > 0 ? ceil_div(rows, block) : 0; }
  std::size_t bytes() const { return bytes_of(k, rows) + bytes_of(v, rows) + bytes_of(k, blocks()); }
  /// The segment in `memory`, without bases and lengths.
  device_segment segment(std::byte* memory) const {
    device_segment made;
    made.k = vectors(k, rows, memory);
    made.v = vectors(v, rows, memory + bytes_of(k, rows));
    made.means = vectors(k, blocks(), memory + bytes_of(k, rows) + bytes_of(v, rows));
    made.block = block;
    return made;
  }

 private:
  static std::size_t whole(std::size_t bytes) { return (bytes + 15) / 16 * 16; }
  std::size_t lanes(index_t count) const { return std::size_t(heads) * std::size_t(count); }
  std::size_t value_bytes(const packed_format& of, index_t count) const {
    return lanes(count) * std::size_t(value_stride(of.value_bytes()));
  }
  std::size_t bit_bytes(const packed_format& of, index_t count) const {
    return whole(lanes(count) * std::size_t(bit_words(of)) * sizeof(std::uint32_t));
  }
  std::size_t bytes_of(const packed_format& of, index_t count) const {
    return value_bytes(of, count) + bit_bytes(of, count) + (of.scaled() ? whole(lanes(count) * sizeof(float)) : 0);
  }
  packed_vectors vectors(const packed_format& of, index_t count, std::byte* from) const {
    std::byte *bits = from + value_bytes(of, count), *scales = bits + bit_bytes(of, count);
    return {of,
            count,
            from,
            reinterpret_cast<std::uint32_t*>(bits),
            of.scaled() ? reinterpret_cast<float*>(scales) : nullptr,
            nullptr,
            nullptr,
            offset_t(count) * value_stride(of.value_bytes()),
            offset_t(count) * bit_words(of)};
  }
};

/// Device memory for the segments that a search has made. `used` marks when they have been copied to the store.
struct search_memory {
  device_buffer<std::byte> bytes;
  stream_mark used;
  explicit search_memory(std::size_t count) : bytes(device_buffer<std::byte>::not_cleared(count)) {}
};

/// Searches a strategy for the rows of one segment in every layer, packs them by it, and copies the result to the
/// device on a stream of its own.
template <packing_layout Layout>
class strategy_task final : public background_task {
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  using T = typename Layout::element_type;
  using rows_type = typename Layout::rows_type;
  static_assert(rows_type::basis_type::rotates && vector_channels<typename rows_type::key_channels> &&
                    vector_channels<typename rows_type::value_channels>,
                "tessera: a strategy is searched for rows that are rotated and choose their own channels");

 public:
  struct layer_part {
    index_t layer;
    host_vector<rows_before> originals;
    index_t rows;
    // The result:
    segment_record record{};
    device_segment made{};
    double loss = 0;  // of all rows, the mean of heads
  };
  host_vector<layer_part> parts;

  /// Allocates memory for every possible result. `copied` marks when the rows are on the host.
  /// Errors   no memory: tessera::error.
  strategy_task(const rows_type& rows, const segment_formats& formats, index_t kv_heads, host_vector<layer_part> of,
                std::shared_ptr<search_memory> memory, std::shared_ptr<stream_mark> copied)
      : parts(std::move(of)),
        rows_(rows),
        formats_(formats),
        heads_(kv_heads),
        memory_(std::move(memory)),
        copied_(std::move(copied)) {
    check(cudaGetDevice(&device_), "cudaGetDevice");
    if (!memory_ || memory_->bytes.size() < bytes_needed()) memory_ = std::make_shared<search_memory>(bytes_needed());
    bases_ = std::make_shared<device_buffer<float>>(
        device_buffer<float>::not_cleared(parts.size() * std::size_t(bases_of_part())));
  }
  ~strategy_task() override {
    const beside_recording beside;
    memory_ = nullptr, bases_ = nullptr;
    parts.clear();
  }
  const std::shared_ptr<search_memory>& memory() const { return memory_; }

 protected:
  void run(const std::atomic<bool>& stopping) override {
    const beside_recording beside;
    check(cudaSetDevice(device_), "cudaSetDevice");
    copied_->wait();
    memory_->used.wait();
    own_stream stream;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!search(parts[i], i, begin, stream.stream, stopping)) return;
      begin += widest(parts[i].rows).bytes();
    }
  }

 private:
  struct own_stream {
    cudaStream_t stream{};
    own_stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"); }
    own_stream(const own_stream&) = delete;
    ~own_stream() { cudaStreamDestroy(stream); }
  };

  segment_image widest(index_t rows) const {
    return {formats_.widest_k, formats_.widest_v, formats_.least_block, heads_, rows};
  }
  std::size_t bytes_needed() const {
    std::size_t total = 0;
    for (const layer_part& part : parts) total += widest(part.rows).bytes();
    return total;
  }
  offset_t bases_of_part() const { return heads_ * (formats_.k_basis() + formats_.v_basis()); }

  /// The address of each row of a layer in head 0, and the distance from one head to the next.
  struct row_addresses {
    host_vector<const T*> k, v;
    host_vector<offset_t> k_head, v_head;
    row_addresses(const layer_part& part, index_t heads) {
      for (const rows_before& some : part.originals) {
        const T* from = reinterpret_cast<const T*>(some.block.get());
        for (index_t i = 0; i < some.rows; ++i) {
          k.push_back(from + offset_t(i) * k_dim), k_head.push_back(offset_t(some.rows) * k_dim);
          v.push_back(from + offset_t(heads) * some.rows * k_dim + offset_t(i) * v_dim);
          v_head.push_back(offset_t(some.rows) * v_dim);
        }
      }
    }
  };
  template <int D>
  static auto loader(const host_vector<const T*>& rows, const host_vector<offset_t>& of_head, index_t head) {
    return [&rows, &of_head, head](index_t i, float* to) {
      const T* from = rows[std::size_t(i)] + head * of_head[std::size_t(i)];
      for (int d = 0; d < D; ++d) to[d] = float(from[d]);
    };
  }

  /// Returns whether it has come to an end.
  bool search(layer_part& part, std::size_t number, std::size_t begin, cudaStream_t stream,
              const std::atomic<bool>& stopping) {
    const row_addresses addresses(part, heads_);
    strategy_search<typename rows_type::key_channels> search(rows_.key);
    const auto name = [&](const char* what, index_t h) {
      return what + std::string(" of layer ") + std::to_string(part.layer) + ", kv_head " + std::to_string(h);
    };
    host_vector<float> bases(static_cast<std::size_t>(bases_of_part()));
    const auto k_basis = [&](index_t h) { return bases.data() + h * formats_.k_basis(); };
    const auto v_basis = [&](index_t h) { return bases.data() + heads_ * formats_.k_basis() + h * formats_.v_basis(); };
    for (index_t h = 0; h < heads_; ++h) {
      if (this->is_over(stopping)) return false;
      const auto keys = loader<k_dim>(addresses.k, addresses.k_head, h);
      const auto values = loader<v_dim>(addresses.v, addresses.v_head, h);
      find_basis<k_dim>(part.rows, formats_.k.channels, name("keys", h), keys, k_basis(h));
      find_basis<v_dim>(part.rows, formats_.v.channels, name("values", h), values, v_basis(h));
      search.add(part.rows, k_dim, formats_.k.channels, k_basis(h), keys);
      search.add(part.rows, v_dim, formats_.v.channels, v_basis(h), values);
      search.add_blocks(part.rows, k_dim, keys);
    }
    const segment_strategy best =
        search.best(rows_.strategy.channel_loss, rows_.strategy.block_spread, rows_.searched_block_unit());
    const rows_type found = rows_.by_strategy(best);
    const segment_image image{found.key_format(), found.value_format(), formats_.block > 0 ? best.block : 0, heads_,
                              part.rows};
    host_vector<std::byte> bytes(image.bytes());
    const device_segment made = image.segment(bytes.data());
    for (index_t h = 0; h < heads_; ++h) {
      if (this->is_over(stopping)) return false;
      pack_side<k_dim>(found.key, made.k, h, part.rows, loader<k_dim>(addresses.k, addresses.k_head, h), k_basis(h),
                       part.loss, image.block, made.means);
      pack_side<v_dim>(found.value, made.v, h, part.rows, loader<v_dim>(addresses.v, addresses.v_head, h), v_basis(h),
                       part.loss, 0, made.means);
    }
    part.loss /= heads_;
    float* on_device = bases_->data() + offset_t(number) * bases_of_part();
    upload(bytes.data(), memory_->bytes.data() + begin, bytes.size(), stream);
    upload(bases.data(), on_device, bases.size() * sizeof(float), stream);
    part.made = image.segment(memory_->bytes.data() + begin);
    part.record.k = image.k, part.record.v = image.v, part.record.block = image.block;
    part.record.bases = bases_;
    part.record.k_basis = on_device, part.record.v_basis = on_device + heads_ * formats_.k_basis();
    return true;
  }
  static void upload(const void* from, void* to, std::size_t bytes, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  template <int D, class Load>
  static void find_basis(index_t count, index_t left, const std::string& of, const Load& load, float* basis) {
    find_rotation(second_moment(count, D, load), D, left, of, basis,
                  [](const double* matrix, index_t n, double* values, double* vectors) {
                    find_eigenvectors_by_jacobi(matrix, n, values, vectors);
                  });
    spread_channels(basis, left, D);
  }

  /// Rotates and packs the rows of one head, keys or values, as the device's `encode_rows` does, and adds half of what
  /// they lose. `block` above 0: and the mean of each block, made before anything is left out.
  template <int D, class Channels, class Load>
  static void pack_side(const Channels& channels, const packed_vectors& to, index_t head, index_t count,
                        const Load& load, float* basis, double& loss, index_t block, const packed_vectors& means) {
    const packed_format& format = to.format;
    const index_t left = format.channels;
    host_vector<float> rows = rotated<D>(count, left, basis, load);
    if (format.group > 1) {
      const host_vector<index_t> order =
          order_of_channels(channels, format, count, [&](index_t i) { return rows.data() + offset_t(i) * left; });
      const host_vector<float> before(basis, basis + offset_t(left) * D);
      for (index_t c = 0; c < left; ++c)
        std::copy_n(before.data() + offset_t(order[std::size_t(c)]) * D, D, basis + offset_t(c) * D);
      rows = rotated<D>(count, left, basis, load);
    }
    host_vector<float> given(D), sum(static_cast<std::size_t>(left), 0.0f);
    for (index_t i = 0; i < count; ++i) {
      const float* row = rows.data() + offset_t(i) * left;
      const std::uint8_t* bits = put_row(channels, to, head, i, row);
      load(i, given.data());
      double all = 0, stays = 0;
      for (const float x : given) all += double(x) * double(x);
      tessera::detail::for_each_stored(format, bits,
                                       [&](index_t c, index_t) { stays += double(row[c]) * double(row[c]); });
      loss += 0.5 * (std::max)(0.0, all - stays) / (all + 1e-12);
      if (block == 0) continue;
      for (index_t c = 0; c < left; ++c) sum[std::size_t(c)] += row[c];
      const index_t in_block = i % block + 1;
      if (in_block < block && i + 1 < count) continue;
      for (float& x : sum) x /= float(in_block);
      put_row(channels, means, head, i / block, sum.data());
      std::fill(sum.begin(), sum.end(), 0.0f);
    }
  }
  template <int D, class Load>
  static host_vector<float> rotated(index_t count, index_t left, const float* basis, const Load& load) {
    host_vector<float> turned(std::size_t(offset_t(left) * D)), rows(std::size_t(offset_t(count) * left), 0.0f);
    for (index_t c = 0; c < left; ++c) {
      for (index_t d = 0; d < D; ++d) turned[std::size_t(offset_t(d) * left + c)] = basis[offset_t(c) * D + d];
    }
    host_vector<float> given(D);
    for (index_t i = 0; i < count; ++i) {
      load(i, given.data());
      float* to = rows.data() + offset_t(i) * left;
      for (index_t d = 0; d < D; ++d) {
        const float x = given[std::size_t(d)], *from = turned.data() + offset_t(d) * left;
        for (index_t c = 0; c < left; ++c) to[c] += x * from[c];
      }
    }
    return rows;
  }
  template <class Channels>
  static const std::uint8_t* put_row(const Channels& channels, const packed_vectors& to, index_t head, index_t i,
                                     const float* row) {
    auto* bits = reinterpret_cast<std::uint8_t*>(to.own_bits_of(head, i));
    channels.choose(row, to.format, bits);
    const float scale = pack_row(to.format, row, bits, to.values_of(head, i));
    if (to.scales) to.scale_of(head, i) = scale;
    return bits;
  }

  rows_type rows_;
  segment_formats formats_;
  index_t heads_;
  int device_ = 0;
  std::shared_ptr<search_memory> memory_;
  std::shared_ptr<stream_mark> copied_;
  std::shared_ptr<device_buffer<float>> bases_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
