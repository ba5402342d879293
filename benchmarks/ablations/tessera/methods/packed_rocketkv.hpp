// RocketKV over MosaicKV's rows.
#pragma once

#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/rocketkv.hpp>

TESSERA_NAMESPACE_BEGIN

template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct packed_rocketkv : rocketkv<T, D, Dv, mosaic_rows<Layout>> {
  static constexpr const char* name = "packed_rocketkv";
  static constexpr const char* paper = "RocketKV, arXiv:2502.14051, over MosaicKV's rows, arXiv:2607.00760";
};

TESSERA_NAMESPACE_END
