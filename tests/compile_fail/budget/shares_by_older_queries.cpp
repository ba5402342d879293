// expect: tessera: a budget that gives shares of what is new needs the queries of what is new
#include <tessera/layout/dense.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/newest_queries.hpp>

using tessera::calibrated, tessera::newest_queries, tessera::top_tokens;

tessera::recipe<tessera::retain<newest_queries, calibrated, top_tokens>, tessera::dense<tessera::fp32, 64>,
                tessera::retrieve_all, tessera::dense_decode, tessera::once>
    refused;
