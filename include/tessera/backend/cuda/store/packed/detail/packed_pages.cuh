// Packed rows on the device in pages of the pool that has the whole rows.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "../../detail/placed_pages.cuh"
#include "segment_format.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// An entry is a (layer, sequence). A page is a page of `Rows`, the pool of whole rows: the part that would hold whole
/// keys holds packed keys of all kv_heads, with their bits and scales, and the part of values packed values of the same
/// tokens. As many fit as the segment's format allows. The means of a segment's blocks lie in pages of their own, in
/// both parts one after the other where these are equally long, else in the parts of keys.
///
/// A segment has lists of pages, and tables of them on the device. Several segments may hold a page; who appends to a
/// shared page gets a copy first, which may be any page behind the shortest head's rows. `plan` acquires everything
/// that `grow` will need, so that `grow` cannot fail.
template <class Rows>
class packed_pages {
 public:
  static constexpr packed_rows_in rows_in = packed_rows_in::pages;

  /// Errors   pages in which no packed row of every kv_head fits: tessera::error.
  packed_pages(const segment_formats& formats, index_t layers, index_t sequences, index_t kv_heads, index_t tokens,
               index_t max_segments)
      : formats_(formats), least_(formats, kv_heads), heads_(kv_heads), layers_(layers), sequences_(sequences) {
    row_width_ = tokens / least_.rows + max_segments + 1;
    mean_width_ = formats.block > 0 ? tokens / formats.least_block / least_.means + max_segments + 1 : 0;
    aside_ = device_buffer<index_t>(std::size_t(row_width_ + mean_width_));
    row_table_ = device_buffer<index_t>(std::size_t(layers) * std::size_t(sequences) * std::size_t(row_width_));
    mean_table_ = device_buffer<index_t>(std::size_t(layers) * std::size_t(sequences) * std::size_t(mean_width_));
  }

  /// Errors   a pool of 64 GiB or more: kernels number its pieces of 16 bytes in 32 bits. tessera::error.
  static void check_pool(offset_t bytes) {
    require(bytes < offset_t(1) << 36, "GiB of a pool with packed rows", bytes >> 30, "fewer than 64",
            "lower cache_options::rows, or take a layout in runs");
  }
  void use(Rows& pool) { pool_ = &pool; }

  void point(device_segment& to, std::size_t entry, std::size_t i, const segment_record& record) const {
    const offset_t k_bytes = Rows::k_page_bytes(heads_), v_bytes = Rows::v_page_bytes(heads_);
    std::byte* const keys = pool_->memory();
    to.k = vectors(record.k, rows_in_page(record), keys, row_table(entry, i, record), k_bytes);
    to.v =
        vectors(record.v, rows_in_page(record), keys + pool_->pages() * k_bytes, row_table(entry, i, record), v_bytes);
    to.means = vectors(record.k, means_in_part(record), keys, mean_table(entry, i, record), k_bytes);
  }

  /// Acquires pages.   Errors   too few are free, or no memory on the host: what was planned before stays planned.
  void plan(const segment_record& record, index_t rows, index_t shortest) {
    const index_t all_rows = pages_of_rows(record, record.rows + rows), all_means = pages_of_means(record, rows);
    planned made;
    made.rows.reserve((std::max)(std::size_t(all_rows), record.row_pages.size()));
    made.means.reserve((std::max)(std::size_t(all_means), record.mean_pages.size()));
    const auto& held = record.row_pages;
    const auto copies_of = [&](const host_vector<index_t>& pages, std::size_t written) {
      return index_t(std::count_if(pages.begin() + std::ptrdiff_t(written), pages.end(),
                                   [&](index_t page) { return is_shared(page); }));
    };
    const index_t copies = copies_of(held, first_written(record, shortest)) +
                           copies_of(record.mean_pages, first_mean_page_written(record, shortest));
    const index_t more = all_rows - index_t(record.row_pages.size()) + all_means - index_t(record.mean_pages.size());
    made.spare.reserve(std::size_t(more + copies));
    planned_.reserve(planned_.size() + 1);
    if (copies > 0) pool_->plan_page_copy();
    pool_->acquire_pages(more + copies, made.spare);
    planned_.push_back(std::move(made));
  }
  void forget() {
    for (; next_ < planned_.size(); ++next_) release(planned_[next_].spare);
    planned_.clear();
    next_ = 0;
  }
  offset_t planned_pages() const {
    offset_t count = 0;
    for (std::size_t i = next_; i < planned_.size(); ++i) count += offset_t(planned_[i].spare.size());
    return count;
  }
  void grow(std::size_t entry, std::size_t i, segment_record& record, index_t rows, index_t shortest,
            cudaStream_t stream) {
    planned& made = planned_[next_];
    const auto extend = [&](host_vector<index_t>& pages, host_vector<index_t>& longer, index_t wanted,
                            std::size_t written) {
      longer.assign(pages.begin(), pages.end());
      std::size_t changed = pages.size();
      for (std::size_t page = pages.size(); page-- > written;) {
        if (!is_shared(longer[page])) continue;
        changed = page;
        const index_t target = pop(made.spare);
        pool_->copy_page(longer[page], target, stream);
        pool_->release_page(longer[page]);
        longer[page] = target;
      }
      while (index_t(longer.size()) < wanted) longer.push_back(pop(made.spare));
      std::swap(pages, longer);
      return changed;
    };
    const std::size_t rows_written = first_written(record, shortest),
                      means_written = first_mean_page_written(record, shortest);
    const index_t all_rows = pages_of_rows(record, record.rows + rows), all_means = pages_of_means(record, rows);
    write_rows(entry, i, record, extend(record.row_pages, made.rows, all_rows, rows_written), stream);
    const std::size_t parts_before = mean_parts_of(record, 0);
    const std::size_t changed =
        extend(record.mean_pages, made.means, all_means, means_written) * std::size_t(mean_parts);
    write_means(entry, i, record, (std::min)(parts_before, changed), mean_parts_of(record, rows), stream);
    release(made.spare);
    ++next_;
    if (next_ == planned_.size()) forget();
  }
  void write_tables(std::size_t entry, std::size_t i, const segment_record& record, cudaStream_t stream) const {
    write_rows(entry, i, record, 0, stream);
    write_means(entry, i, record, 0, mean_parts_of(record, 0), stream);
  }
  static constexpr bool moves_with_first_row = false;
  void plan_keep(kept_segment& kept) {
    segment_record& record = kept.record;
    kept.rows_elsewhere = keeps_elsewhere(record.row_pages, pages_of_rows(record, record.rows));
    kept.means_elsewhere = keeps_elsewhere(record.mean_pages, pages_of_means(record, 0));
  }
  void forget(kept_segment& kept) {
    if (kept.rows_elsewhere) release(kept.record.row_pages);
    if (kept.means_elsewhere) release(kept.record.mean_pages);
  }
  device_segment set_aside(device_segment of, const segment_record& record, cudaStream_t stream) const {
    copy_on_device(aside_.data(), of.k.pages, record.row_pages.size(), stream);
    of.k.pages = of.v.pages = aside_.data();
    if (record.block == 0) return of;
    copy_on_device(aside_.data() + row_width_, of.means.pages, mean_parts_of(record, 0), stream);
    of.means.pages = aside_.data() + row_width_;
    return of;
  }
  void release_dropped(kept_segment& old, const segment_record& record) {
    const auto drop = [&](host_vector<index_t>& pages, std::size_t left) {
      for (; pages.size() > left; pages.pop_back()) pool_->release_page(pages.back());
    };
    drop(old.record.row_pages, old.rows_elsewhere ? 0 : record.row_pages.size());
    drop(old.record.mean_pages, old.means_elsewhere ? 0 : record.mean_pages.size());
  }

  void share(segment_record& record, std::size_t entry) {
    record.home = entry;
    for (const index_t page : record.row_pages) pool_->share_page(page);
    for (const index_t page : record.mean_pages) pool_->share_page(page);
  }
  void release(segment_record& record) {
    release(record.row_pages);
    release(record.mean_pages);
  }
  void copy_tables(index_t from, index_t to, cudaStream_t stream) const {
    copy_tables(row_table_, row_width_, from, to, stream);
    if (mean_width_ > 0) copy_tables(mean_table_, mean_width_, from, to, stream);
  }

  /// Shared pages count in parts.
  offset_t bytes(const segment_record& record) const {
    return pool_->counted().bytes(record.row_pages, page_bytes()) +
           pool_->counted().bytes(record.mean_pages, page_bytes());
  }
  capacity upper_bound(offset_t tokens, offset_t segments) const {
    const offset_t pages = least_.max_pages(formats_, tokens, segments);
    return {pages * page_bytes(), pages};
  }
  static constexpr offset_t bytes() { return 0; }

  static offset_t pool_rows(const segment_formats& formats, offset_t entries, offset_t kv_heads, index_t tokens,
                            index_t segments) {
    return entries * least_in_pages(formats, kv_heads).max_pages(formats, tokens, segments) * Rows::page * kv_heads;
  }

 private:
  static constexpr bool means_in_both = Rows::k_dim == Rows::v_dim;  // parts of a page
  /// What a page holds of the longest rows that a segment may have.
  struct least_in_pages {
    index_t rows, means;  // means: of one part
    least_in_pages(const segment_formats& formats, offset_t kv_heads)
        : rows(rows_in_page(kv_heads, formats.widest_k, formats.widest_v)),
          means(in_part(kv_heads, Rows::k_page_bytes(kv_heads), formats.widest_k)) {
      require(rows > 0, "rows of a page", std::to_string(Rows::page) + " whole ones",
              "pages that hold a packed row of every kv_head", "take larger pages or fewer channels");
    }
    /// Pages that `tokens` rows in so many segments take at most.
    offset_t max_pages(const segment_formats& formats, offset_t tokens, offset_t segments) const {
      const offset_t blocks = formats.block > 0 ? tokens / formats.least_block + segments : 0;
      return tokens / rows + segments + (blocks > 0 ? blocks / (mean_parts * means) + segments : 0);
    }
  };
  static constexpr index_t mean_parts = means_in_both ? 2 : 1;  // of a page
  struct planned {
    host_vector<index_t> spare, rows, means;  // pages; empty lists with memory for those that the segment will have
  };

  offset_t page_bytes() const { return Rows::k_page_bytes(heads_) + Rows::v_page_bytes(heads_); }
  /// Rows of every kv_head in a part of a page.
  static index_t in_part(offset_t kv_heads, offset_t bytes, const packed_format& of) {
    return index_t(bytes / (kv_heads * packed_row_bytes(of)));
  }
  static index_t rows_in_page(offset_t kv_heads, const packed_format& k, const packed_format& v) {
    return (std::min)(in_part(kv_heads, Rows::k_page_bytes(kv_heads), k),
                      in_part(kv_heads, Rows::v_page_bytes(kv_heads), v));
  }
  index_t rows_in_page(const segment_record& record) const { return rows_in_page(heads_, record.k, record.v); }
  index_t means_in_part(const segment_record& record) const {
    return in_part(heads_, Rows::k_page_bytes(heads_), record.k);
  }
  index_t pages_of_rows(const segment_record& record, index_t rows) const {
    return ceil_div(rows, rows_in_page(record));
  }
  index_t pages_of_means(const segment_record& record, index_t more_rows) const {
    if (record.block == 0) return 0;
    return ceil_div(index_t(mean_parts_of(record, more_rows)), mean_parts);
  }
  /// Parts of pages that the means of a segment with so many more rows lie in.
  std::size_t mean_parts_of(const segment_record& record, index_t more_rows) const {
    if (record.block == 0) return 0;
    return std::size_t(ceil_div(ceil_div(record.rows + more_rows, record.block), means_in_part(record)));
  }
  bool is_shared(index_t page) const { return pool_->counted().is_shared(page); }
  /// The first page that more rows are written to: each head's lie behind its own.
  std::size_t first_written(const segment_record& record, index_t shortest) const {
    return (std::min)(record.row_pages.size(), std::size_t(shortest / rows_in_page(record)));
  }
  /// The first page that means of more rows are written to. The mean of a block that is not whole is written anew.
  std::size_t first_mean_page_written(const segment_record& record, index_t shortest) const {
    if (record.block == 0) return 0;
    return (std::min)(record.mean_pages.size(),
                      std::size_t(shortest / record.block / (mean_parts * means_in_part(record))));
  }
  /// Leaves `wanted` pages, or others in their place where some are shared. Returns whether they are others.
  bool keeps_elsewhere(host_vector<index_t>& pages, index_t wanted) const {
    if (std::none_of(pages.begin(), pages.end(), [&](index_t page) { return is_shared(page); })) {
      pages.resize(std::size_t(wanted));
      return false;
    }
    host_vector<index_t> others;
    others.reserve(std::size_t(wanted));
    pool_->acquire_pages(wanted, others);
    std::swap(pages, others);
    return true;
  }
  static index_t pop(host_vector<index_t>& pages) {
    const index_t page = pages.back();
    pages.pop_back();
    return page;
  }
  void release(host_vector<index_t>& pages) {
    for (; !pages.empty(); pages.pop_back()) pool_->release_page(pages.back());
  }

  packed_vectors vectors(const packed_format& of, index_t rows, std::byte* begin, const index_t* pages,
                         offset_t bytes) const {
    const offset_t stride = value_stride(of.value_bytes()), words = bit_words(of);
    std::byte* const bits = begin + heads_ * rows * stride;
    std::byte* const scales = bits + (of.own_bits ? heads_ * rows * words * 4 : 0);
    return {of,
            rows,
            begin,
            of.own_bits ? reinterpret_cast<std::uint32_t*>(bits) : nullptr,
            of.scaled() ? reinterpret_cast<float*>(scales) : nullptr,
            nullptr,
            nullptr,
            rows * stride,
            rows * words,
            pages,
            bytes,
            quick_divisor(rows)};
  }
  // A segment of n rows takes at most n / least_.rows + 1 pages, whatever its format. So tables of segments that follow
  // each other do not overlap.
  index_t* row_table(std::size_t entry, std::size_t i, const segment_record& record) const {
    return row_table_.data() + offset_t(entry) * row_width_ + record.first_row / least_.rows + offset_t(i);
  }
  index_t* mean_table(std::size_t entry, std::size_t i, const segment_record& record) const {
    if (formats_.block == 0) return nullptr;
    return mean_table_.data() + offset_t(entry) * mean_width_ + record.first_row / formats_.least_block / least_.means +
           offset_t(i);
  }
  /// Writes numbers from `first` on: number(i) for i < count.
  template <class Number>
  static void write(index_t* table, std::size_t first, std::size_t count, const Number& number, cudaStream_t stream) {
    while (first < count) {
      detail::some_pages some{};
      const std::size_t several = (std::min)(count - first, std::size_t(detail::pages_at_a_time));
      for (std::size_t i = 0; i < several; ++i) some.pages[i] = number(first + i);
      detail::set_pages_entry<128><<<1, 128, 0, stream>>>(some, index_t(several), table + first);
      check(cudaGetLastError(), "launch of set_pages");
      first += several;
    }
  }
  void write_rows(std::size_t entry, std::size_t i, const segment_record& record, std::size_t first,
                  cudaStream_t stream) const {
    write(
        row_table(entry, i, record), first, record.row_pages.size(),
        [&](std::size_t page) { return record.row_pages[page]; }, stream);
  }
  /// Parts `first` to `count` - 1. A part of values has the number of its page behind all parts of keys.
  void write_means(std::size_t entry, std::size_t i, const segment_record& record, std::size_t first, std::size_t count,
                   cudaStream_t stream) const {
    constexpr std::size_t parts = std::size_t(mean_parts);
    write(
        mean_table(entry, i, record), first, count,
        [&](std::size_t part) { return record.mean_pages[part / parts] + index_t(part % parts) * pool_->pages(); },
        stream);
  }
  void copy_tables(const device_buffer<index_t>& tables, index_t width, index_t from, index_t to,
                   cudaStream_t stream) const {
    copy_in_layers(tables.data(), layers_, offset_t(sequences_) * width, offset_t(from) * width, offset_t(to) * width,
                   width, stream);
  }

  segment_formats formats_;
  least_in_pages least_;
  index_t heads_, layers_, sequences_;
  index_t row_width_ = 0, mean_width_ = 0;  // of an entry's tables
  Rows* pool_ = nullptr;
  device_buffer<index_t> row_table_, mean_table_;  // [layers, sequences, width]
  device_buffer<index_t> aside_;                   // [width], of one segment
  host_vector<planned> planned_;
  std::size_t next_ = 0;  // the first that has not been used
};

}  // namespace cuda
TESSERA_NAMESPACE_END
