// Which step of a cache is under way, as far as the host knows.
#pragma once

#include <algorithm>
#include <string>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../runtime/turn/conversations.hpp"
#include "../../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Checks that `begin_step` and `decode` are called for the step that `prepare_step` made last: begun once, then its
/// layers in ascending order. The host does not see replays of a graph. So a recorded call is only checked to be of
/// that step.
///
/// `prepare_step` notes on the host what the step appends. If the step is never carried out, the host counts one step
/// more than the device for its sequences. They are then unfinished, and may only be closed. Once a call has been
/// recorded, a prepared step may have been replayed, so it is accepted.
template <class Recipe>
class step_order {
 public:
  explicit step_order(index_t layers) : layers_(layers), drafted_(layers) {}

  /// Errors   the sequence's step was prepared but not decoded in every layer, so rows are missing.
  void require_finished(index_t id) const {
    require(!contains(unfinished_, id) && !(is_unfinished() && contains(now_.ids, id)),
            "sequence in the middle of a step", id, "one whose step has been decoded in every layer",
            "decode the layers that are missing, or close the sequence");
  }
  /// Errors   the same of any sequence.
  void require_all_finished() const {
    if (is_unfinished()) require_finished(now_.ids.front());
  }
  /// Errors   a step has begun and has layers left: it would not find rows that move now.
  void require_none_under_way() const {
    const bool waits = has_begun_ && !is_stale_ && !now_.ids.empty() && next_layer_ < layers_;
    require(!waits, "layers that the step under way has been through", next_layer_, std::to_string(layers_),
            "decode the layers that are missing first: they would not find rows that move");
  }
  /// Counts the tokens of a step in every layer.
  void prepared(const batch& step, conversations<Recipe>& known) {
    for (index_t layer = 0; layer < layers_; ++layer) known.took_step(layer, step);
    if (is_unfinished()) unfinished_.insert(unfinished_.end(), now_.ids.begin(), now_.ids.end());
    now_ = step;
    has_begun_ = is_stale_ = is_draft_ = false;
    next_layer_ = 0;
  }
  /// The same for a draft, whose tokens count when they are accepted.
  void prepared_draft(const batch& draft) {
    if (is_unfinished()) unfinished_.insert(unfinished_.end(), now_.ids.begin(), now_.ids.end());
    now_ = draft;
    has_begun_ = is_stale_ = false;
    is_draft_ = true;
    next_layer_ = 0;
    drafted_.open(*std::max_element(draft.ids.begin(), draft.ids.end()));
  }
  void require_draft(const batch& draft, cudaStream_t stream) const {
    require_unchanged(draft);
    if (is_recorded(stream)) return;
    require(has_begun_, "calls of begin_step for a draft", 0, "1", "call begin_step before the layers of a draft");
  }
  /// A layer has had the draft.
  void drafted(index_t layer, cudaStream_t stream) {
    if (is_recorded(stream)) sees_all_ = false;
    for (const index_t id : now_.ids) drafted_[sequence_layer{layer, id}] = now_.number;
    next_layer_ = (std::max)(next_layer_, layer + 1);
  }
  /// Errors   a layer has not had the draft of that number, as far as the host knows.
  void require_drafted(index_t id, std::uint64_t number) const {
    for (index_t layer = 0; sees_all_ && layer < layers_; ++layer) {
      require(drafted_[sequence_layer{layer, id}] == number, "layers of the draft of sequence " + std::to_string(id),
              layer, "all of the model", "decode the draft in every layer before it is accepted");
    }
  }
  /// Whether the sequence's step has layers left.
  bool is_under_way(index_t id) const { return is_unfinished() && contains(now_.ids, id); }
  /// Whether the step's tokens are counted on the device.
  bool is_counted(index_t id) const { return has_begun_ || !is_under_way(id); }

  void begin(const batch& step, cudaStream_t stream) {
    require_unchanged(step);
    sees_all_ = sees_all_ && !is_recorded(stream);
    if (is_recorded(stream)) return;
    require(!has_begun_, "calls of begin_step for a step", 2, "1",
            "call prepare_step, or prepare_draft, before every begin_step");
    has_begun_ = true;
  }
  void require_layer(index_t layer, const batch& step, cudaStream_t stream) const {
    require_unchanged(step);
    if (is_recorded(stream)) return;
    require(has_begun_, "calls of begin_step for a step", 0, "1", "call begin_step before the layers of a step");
    require(layer >= next_layer_, "layer of a step", layer, "one behind those that the step has been through",
            "decode every layer, in order, in every step");
  }
  /// Errors   the step has not been through the layer.
  void require_decoded(index_t layer, const batch& step, cudaStream_t stream) const {
    require_unchanged(step);
    if (is_recorded(stream)) return;
    require(layer < next_layer_, "layer of a step", layer, "one that the step has been through",
            "decode the layer first");
  }
  void decoded(index_t layer, cudaStream_t stream) {
    if (is_recorded(stream))
      sees_all_ = false;
    else
      next_layer_ = layer + 1;
  }

  /// Called when rows or plans have moved: a step that has begun cannot continue.
  void disturbed() { is_stale_ = is_stale_ || has_begun_; }
  void disturbed(index_t id) {
    if (contains(now_.ids, id)) disturbed();
  }
  void closed(index_t id) {
    is_stale_ = is_stale_ || contains(now_.ids, id);
    std::erase(now_.ids, id);
    std::erase(unfinished_, id);
  }

 private:
  static bool contains(const host_vector<index_t>& ids, index_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  }
  static bool is_recorded(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  /// Whether the step that was prepared last has layers left, as far as the host knows.
  bool is_unfinished() const {
    return !is_draft_ && !now_.ids.empty() && next_layer_ < layers_ && (sees_all_ || next_layer_ > 0);
  }
  void require_prepared(const batch& step) const {
    require(!is_stale_ && !step.ids.empty() && step.number == now_.number, "step",
            std::to_string(step.sequences()) + " sequences of " + std::to_string(step.tokens) + " tokens",
            "what prepare_step returned last, and nothing changed since",
            "call prepare_step, begin_step and the layers in this order");
  }

  void require_unchanged(const batch& step) const {
    require_prepared(step);
    if (!step.takes_as(now_)) {
      fail("step", "of other sequences, tokens or rows than prepare_step returned", "unchanged",
           "pass what prepare_step returned");
    }
  }

  index_t layers_;
  batch now_;
  bool has_begun_ = false, is_stale_ = false, is_draft_ = false;
  bool sees_all_ = true;                   // no call was ever recorded
  index_t next_layer_ = 0;                 // of the step that has begun
  sequence_table<std::uint64_t> drafted_;  // the number of the draft that a layer had last
  host_vector<index_t> unfinished_;        // sequences of steps that were followed by another one
};

}  // namespace cuda
TESSERA_NAMESPACE_END
