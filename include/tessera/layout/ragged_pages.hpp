// Pages that a few kv_heads of like length share, as TANGRAM keeps them.
#pragma once

#include <algorithm>

#include "../concepts/layout.hpp"
#include "../core/engine/head_groups.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/parameters.hpp"
#include "../core/plan/share_table.hpp"
#include "../core/views.hpp"

TESSERA_NAMESPACE_BEGIN

/// Each group of `heads` kv_heads has a table of pages. A page [heads, page, dim] has one column for each head of the
/// group. Column c of page p is block p * heads + c of a pool of blocks [.., page, dim]. Thus every (sequence, kv_head)
/// has its own table of blocks, which any paged kernel reads as a sequence of one head. All layers and sequences share
/// the pool. A group has pages for its longest head; the other heads leave slots empty. With `fitted`, heads whose
/// shares differ much are in smaller groups, where each head has several columns of a page. Heads of sliding layers,
/// which hold a window and no share, come before all others where groups go over the model.
/// Errors   heads that do not divide the kv_heads of a layer (of the model, clustered or fitted over it):
///          tessera::error. A layer of fewer than 4 heads is one group where `heads` is left at 4.
/// Paper    TANGRAM, arXiv:2606.06302, Sec. 4.2.
struct ragged_pages {
  static constexpr const char* name = "ragged_pages";
  using table_type = csr_table;
  static constexpr index_t usual_heads = 4;

  index_t heads = usual_heads;
  index_t page = 16;
  clustering cluster = clustering::layer;
  index_t max_pages = 0;        ///< of the pool; 0: as many as are asked for
  share_table shares{};         ///< what heads are expected to keep; null: all alike
  index_t whole_layers = 0;     ///< so many of the first layers keep everything
  host_vector<bool> sliding{};  ///< [layers]: which layers slide; empty: none

  head_groups groups(index_t layers, index_t kv_heads) const {
    host_vector<double> expected;
    for (index_t i = 0; (shares.data || !sliding.empty()) && i < layers * kv_heads; ++i) {
      const index_t layer = i / kv_heads;
      const bool whole = layer < whole_layers || !shares.data;
      if (!sliding.empty() && sliding[std::size_t(layer)])
        expected.push_back(0.0);
      else
        expected.push_back(whole ? 1.0 : shares.share(layer, i % kv_heads));
    }
    return group_heads(layers, kv_heads, heads == usual_heads ? (std::min)(heads, kv_heads) : heads, cluster, expected);
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("heads", self.heads, value_range{1, 1 << 16}, "KV heads that share a table of pages");
    visit("page", self.page, value_range{1, 4096}, "tokens of a page");
    visit("cluster", self.cluster, one_word_of{"layer or model or none or fitted"},
          "among which heads groups are formed by budget");
  }
};

static_assert(placement<ragged_pages>);

TESSERA_NAMESPACE_END
