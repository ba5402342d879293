// The scope of docs/how_to/add_a_scope.md.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

TESSERA_NAMESPACE_BEGIN

// [scope]
/// One set for all heads of a layer, by the score that the most reluctant head gives: a token stays when no head can spare it
/// for another. NaN in one head ranks the token last.
struct least_of_heads {
  static constexpr const char* name = "least_of_heads";

  TESSERA_HD float join(float joined, float score) const { return joined < score ? joined : score; }
  TESSERA_HD float joined(float total, index_t) const { return total; }
};

static_assert(check_scope<least_of_heads>());
// [scope]

TESSERA_NAMESPACE_END

using namespace tessera;
recipe<retain<observation_window, uniform, top_tokens, least_of_heads>, dense<fp32, 64>, retrieve_all, dense_decode,
       once>
    method;
