// The scores that a policy's scorer gives without queries, on the GPU: by position, by contents, beside the tokens behind.
#pragma once

#include "contents.cuh"
#include "lagged.cuh"
#include "score_positions.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Where a scorer asks queries, or nothing is weighed.
struct no_stored_score {
  no_stored_score(index_t, index_t) {}
  std::size_t workspace_bytes() const { return 0; }
};
struct position_score {
  position_score(index_t, index_t) {}
  std::size_t workspace_bytes() const { return 0; }
  template <class View, class Scorer>
  void run(const View& view, const index_t* next, const Scorer& scorer, float* scores, offset_t row_stride, void*,
           cudaStream_t stream) const {
    score_positions(view, next, scorer, scores, row_stride, stream);
  }
};
/// `Score`, score_contents or score_lagged, with the arguments of the others.
template <class Score>
struct row_score : Score {
  using Score::Score;
  template <class View, class Scorer>
  void run(const View& view, const index_t*, const Scorer& scorer, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    Score::run(view, scorer, scores, row_stride, workspace, stream);
  }
};

template <class View, class Scorer>
struct stored_score {
  using type = no_stored_score;
};
template <class View, positional_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = position_score;
};
template <class View, contents_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = row_score<score_contents<View, Scorer>>;
};
template <class View, lagged_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = row_score<score_lagged<View, Scorer>>;
};

template <class View, class Scorer>
struct weight_score {
  using type = no_stored_score;
};
template <class View, weighted_scorer Scorer>
struct weight_score<View, Scorer> {
  using type = typename stored_score<View, std::remove_cvref_t<decltype(std::declval<Scorer&>().weight)>>::type;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
