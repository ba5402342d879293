// Questions about one document on a GPU: what is read once is answered as if it had been read each time.
#include "catch.hpp"

#ifdef TESSERA_TOOL_CUDA
#include "../tool/prefix_questions.hpp"
#include "built_dims.hpp"
#include "engine/cuda/model.hpp"

using namespace tool_tests;

TEST_CASE("every method on CUDA answers questions about a document that was read once as if each had read it") {
  try {
    engine::cuda::require_device();
  } catch (const tessera::error&) {
    WARN("skipped: no CUDA device on this machine");
    return;
  }
  if (!has_dim(64)) {
    WARN("skipped: the tool is not built for head dim 64");
    return;
  }
  bench on(2, tool::backend::cuda);
  on.model->set_chunk(64);
  const plans all = questions_about(on, 16, {"x", "y", "z"});
  std::vector<tool::variant> variants = all_methods({40, 80});
  std::erase_if(variants, [](const tool::variant& row) { return !row.method->on_cuda; });
  const auto groups = groups_of(on, all, 1, 64);
  REQUIRE(groups.size() == 1);
  const auto once = asked(on, variants, all, groups, true), each = asked(on, variants, all, groups, false);
  check_same(variants, once.cells(), each.cells());
  for (const tool::cell& one : once.cells()) {
    const bool reuses = one.turn == 1 && !variants[one.variant].method->fuses_chunks;
    CHECK(one.reused_tokens == (reuses ? 2 * std::int64_t(groups[0].shared) : 0));
  }
}
#else
TEST_CASE("questions about a document on CUDA are not part of this build") { SUCCEED(); }
#endif
