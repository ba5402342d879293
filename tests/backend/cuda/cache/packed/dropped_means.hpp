// Recipes whose steps read blocks, by their means, of the packed rows that a first stage has left; and these means.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "support/calls/saved_bytes.hpp"
#include "tessera/budget/adaptive.hpp"
#include "tessera/budget/two_stage.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/cache.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/mosaickv.hpp"
#include "tessera/scorer/observation_window.hpp"
#include "tessera/scorer/random_score.hpp"
#include "tessera/selector/top_tokens.hpp"

namespace gpu_test {
using namespace tessera;

/// Steps read few tokens, so that they choose.
template <class Scorer, class Budget, class Layout>
struct means_behind : recipe<retain<Scorer, Budget, top_tokens>, mosaic_rows<Layout>,
                             retrieve<block_mean, whole_blocks>, gathered_decode, once> {
  means_behind() { this->retrieve.tokens = 24; }
};

template <class T, int Page>
using packed_in_pages = stored<dense_rows<T, 64>, fixed_pages<Page>>;

/// Elements of all means of a layer of a sequence: by segment, kv_head, block and channel.
template <class Method>
std::vector<float> means_of(tessera::cache<Method>& kv, index_t layer, index_t id) {
  std::vector<float> all;
  for (const auto& segment : *kv.view(layer, id).segments) {
    for (index_t h = 0; h < kv.shape().kv_heads; ++h) {
      for (index_t b = 0; b < segment->blocks(h); ++b) {
        for (index_t c = 0; c < segment->format.k.channels; ++c) {
          std::vector<float> unit(std::size_t(segment->format.k.channels), 0.0f);
          unit[std::size_t(c)] = 1;
          all.push_back(segment->mean_dot(h, b, unit.data()));
        }
      }
    }
  }
  return all;
}
/// The averages of their rows, as `means_of` orders them.
template <class Method>
std::vector<float> averages_of(tessera::cache<Method>& kv, index_t layer, index_t id) {
  std::vector<float> all;
  for (const auto& segment : *kv.view(layer, id).segments) {
    const index_t channels = segment->format.k.channels, block = segment->format.block;
    for (index_t h = 0; h < kv.shape().kv_heads; ++h) {
      const index_t rows = segment->lengths[std::size_t(h)];
      for (index_t begin = 0; begin < rows; begin += block) {
        const index_t end = std::min(rows, begin + block);
        std::vector<float> sum(Method::layout_type::k_dim, 0.0f), row(sum);
        for (index_t i = begin; i < end; ++i) {
          segment->unpack_key(h, i, row.data());
          for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += row[c] / float(end - begin);
        }
        all.insert(all.end(), sum.begin(), sum.begin() + channels);
      }
    }
  }
  return all;
}
/// A cache of the host with what a device's sequence has, as its sequence 0.
template <class Method, class Cache>
std::unique_ptr<tessera::cache<Method>> on_host(Cache& device, index_t id, const Method& method) {
  auto made = std::make_unique<tessera::cache<Method>>(device.shape(), method, std::make_shared<cpu::executor>(1));
  REQUIRE(support::loaded(*made, support::saved(device, id)) == 0);
  return made;
}

}  // namespace gpu_test
