// A layout: a row format at a placement.
#pragma once

#include "../concepts/host_only.hpp"
#include "../concepts/layout.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Rows of one format at one placement: any pair composes.
template <class Rows, class Where>
struct stored {
  static_assert(check_row_format<Rows>());
  static_assert(placement<Where>, "tessera: a placement needs a name and a table_type that finds slots");
  using rows_type = Rows;
  using placement_type = Where;
  using encoding_type = typename Rows::encoding_type;
  using element_type = typename encoding_type::element_type;
  static constexpr bool host_only = !runs_on_devices<Rows, Where>;
  static constexpr int k_dim = Rows::k_dim;
  static constexpr int v_dim = Rows::v_dim;
  /// How many of a prompt's last queries its rows are packed by.
  static constexpr index_t window = [] {
    if constexpr (requires { Rows::window(); }) return Rows::window();
    return index_t(0);
  }();

  Rows rows{};

  /// Bytes of K and V of one token of one kv_head before anything is left out, scales included.
  static constexpr offset_t token_bytes() {
    return row_bytes(k_dim) + (latent_encoding<encoding_type> ? 0 : row_bytes(v_dim));
  }
  static constexpr offset_t key_bytes() { return row_bytes(k_dim); }

  /// `block` of means that a second stage reads; 0: none.
  void check([[maybe_unused]] index_t block) const {
    if constexpr (requires { rows.check(block); }) rows.check(block);
  }
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    if constexpr (has_parameters<Rows>) Rows::parameters(self.rows, visit);
  }
  template <class Visit>
  static void policies(Visit&& visit) {
    visit("rows", Rows::name);
    if constexpr (requires { Rows::policies(visit); }) Rows::policies(visit);
    visit("placement", Where::name);
  }

 private:
  static constexpr offset_t row_bytes(int dim) {
    using unit = typename encoding_type::stored_type;
    return offset_t(dim / elements_of_unit<unit>) * offset_t(sizeof(unit)) +
           (encoding_type::scaled ? offset_t(sizeof(float)) : 0);
  }
};

TESSERA_NAMESPACE_END
